"""A non-finite gradient skips the whole step, wherever it is; a huge finite one does not."""

import copy
import math

import pytest
import torch

import reference
from ampfuse import optim
from cases import (
    CHUNK,
    KINDS,
    OPTIMIZERS,
    assert_same_bits,
    bf16,
    f16,
    f32,
    f64,
    give_gradients,
    make,
    parameters,
    snapshot,
    train,
)

inf, nan = math.inf, math.nan
SIZES = (1, 40, CHUNK + 21)
# Where in the last tensor: its ends, within a vector, at the chunk boundary, in the remainder.
PLACES = (0, 7, 16, CHUNK - 1, CHUNK, CHUNK + 16, CHUNK + 20)


def params(dtype, device, scale=1.0):
    """Parameters that have gradients."""
    made = parameters([(n,) for n in SIZES], dtype, device=device)
    give_gradients(made, scale=scale)
    return made


def assert_skips(optimizer):
    before = snapshot(optimizer)
    optimizer.step()
    assert_same_bits(snapshot(optimizer), before)
    assert optimizer.last_step.skipped == 1
    assert optimizer.last_step.grad_norm.isnan()


@pytest.mark.covers(2)
@pytest.mark.parametrize("bad", [inf, -inf, nan])
@pytest.mark.parametrize("dtype", [f32, f16, bf16])
@pytest.mark.parametrize("name", KINDS)
def test_a_skipped_step_keeps_every_bit(name, dtype, bad, device):
    held = params(dtype, device)
    optimizer = make(name, held, master_weights=dtype != f32, skip_nonfinite=True)
    train(optimizer, range(2))  # so that all of its state exists
    assert optimizer.last_step.skipped == 0
    # Two in tensors of less than a vector, and not the last.
    for i, place in [(2, place) for place in PLACES] + [(0, -1), (1, -1)]:
        give_gradients(held)
        held[i].grad[place] = bad
        assert_skips(optimizer)
    before = snapshot(optimizer)
    train(optimizer)  # and the next clean step is made
    assert optimizer.last_step.skipped == 0
    after = snapshot(optimizer)
    stepped = "param" if dtype == f32 else "master_param"
    for i in range(len(SIZES)):
        assert not torch.equal(after[f"{stepped} {i}"], before[f"{stepped} {i}"])


def test_one_bad_tensor_of_many_skips_the_step(device):
    held = parameters([(i % 7,) for i in range(600)], device=device)
    optimizer = make("adamw", held, skip_nonfinite=True)
    for i in (1, 299, 598):
        give_gradients(held)
        held[i].grad[-1:] = inf
        optimizer.step()
        assert optimizer.last_step.skipped == float(held[i].numel() > 0)


@pytest.mark.parametrize("name", KINDS)
def test_a_skipped_first_step_leaves_no_trace(name, device):
    """SGD's buffer starts as the first applied gradient, Adam counts applied steps."""
    held = params(f32, device)
    twin, ours = make(name, copy.deepcopy(held)), make(name, held, skip_nonfinite=True)
    held[1].grad[3] = nan
    ours.step()
    for optimizer in (ours, twin):
        train(optimizer, range(3))
    assert_same_bits(snapshot(ours), snapshot(twin))


# --- who skips -----------------------------------------------------------------------------------


def test_a_bad_value_propagates_as_in_torch_if_nothing_is_to_skip(device):
    held = params(f32, device)
    optimizer = make("adamw", held, skip_nonfinite=False)
    held[1].grad[5] = nan
    optimizer.step()
    assert optimizer.last_step.skipped == 0
    assert optimizer.last_step.grad_norm is None
    assert held[1].isnan().nonzero().tolist() == [[5]]
    assert held[0].isfinite().all()


@pytest.mark.parametrize(
    "options", [{}, {"skip_nonfinite": True}, {"skip_nonfinite": False, "max_grad_norm": 1.0}]
)
def test_a_bad_value_skips_the_step(options, device):
    held = params(f32, device)
    optimizer = make("adamw", held, **options)
    train(optimizer)
    norm = reference.norm([param.grad.cpu() for param in held])
    assert float(optimizer.last_step.grad_norm) == pytest.approx(norm, rel=1e-6)
    held[1].grad[5] = inf
    assert_skips(optimizer)


@pytest.mark.parametrize("name", KINDS)
def test_looking_for_bad_values_changes_no_bit(name, device):
    held = params(bf16, device)
    snapshots = []
    for skip in (False, None):
        optimizer = make(name, copy.deepcopy(held), master_weights=True, skip_nonfinite=skip)
        train(optimizer, range(3))
        snapshots.append(snapshot(optimizer))
    assert_same_bits(*snapshots)


# --- the report ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "kind"), [(inf, "inf"), (-inf, "inf"), (nan, "nan")])
def test_the_report_names_parameter_kind_and_number_of_skipped_steps(bad, kind, device):
    held = parameters([(5,), (50,)], device=device)
    named = zip(("head.weight", "body.weight"), held, strict=True)
    optimizer = optim.AdamW(list(named), skip_nonfinite=True)
    train(optimizer)
    assert optimizer.last_step.overflow() is None
    for skipped in (1, 2):
        give_gradients(held)
        held[1].grad[30] = bad
        optimizer.step()
        report = {"parameter": "body.weight", "kind": kind, "skipped_steps": skipped}
        assert optimizer.last_step.overflow() == report
    train(optimizer)
    # The latest overflow stays known after clean steps.
    assert optimizer.last_step.overflow() == report
    assert optimizer.last_step.skipped == 0


def test_the_report_names_the_first_of_several(device):
    """By its place if it has no name."""
    held = params(f32, device)
    groups = [{"params": held[:1]}, {"params": held[1:]}]
    optimizer = make("sgd-all", groups, skip_nonfinite=True)
    held[2].grad[CHUNK + 3] = inf
    held[1].grad[2] = nan
    optimizer.step()
    report = optimizer.last_step.overflow()
    assert report["parameter"] == "param_groups[1]['params'][0] of shape (40,)"
    assert report["kind"] == "nan"


# --- huge and tiny gradients ---------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_bf16_1e20_is_no_overflow_and_clips_right(name, device):
    held = params(bf16, device, 1e20)
    optimizer = make(name, held, master_weights=True, max_grad_norm=1.0)
    rule = reference.RULES[type(optimizer).__name__](**OPTIMIZERS[name][1])
    grads = [param.grad.cpu() for param in held]
    norm = reference.norm(grads)
    coefficient = reference.clip_coefficient(norm, 1.0)
    start = [param.detach().cpu().to(f64) for param in held]
    optimizer.step()
    assert optimizer.last_step.skipped == 0
    assert float(optimizer.last_step.grad_norm) == pytest.approx(norm, rel=1e-6)
    for param, grad, p in zip(held, grads, start, strict=True):
        exact = rule.step(p, grad.to(f64) * coefficient, {})
        master = optimizer.state[param]["master_param"].cpu().to(f64)
        torch.testing.assert_close(master, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.covers(1)
@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-25, 1e-7, 1e18, 1e25, 1e36])
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_norm_of_finite_gradients_of_any_magnitude_is_accurate(magnitude, dtype, device):
    held = params(dtype, device, magnitude)
    optimizer = make("sgd", held, max_grad_norm=inf)
    norm = reference.norm([param.grad.cpu() for param in held])
    optimizer.step()
    assert optimizer.last_step.skipped == 0
    # Near the smallest subnormal FP32 itself has few digits.
    assert float(optimizer.last_step.grad_norm) == pytest.approx(norm, rel=1e-5, abs=2e-45)


def test_the_largest_finite_gradients_are_no_overflow(device):
    held = params(f32, device)
    for param in held:
        param.grad.fill_(torch.finfo(f32).max)
    optimizer = make("sgd", held, max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.last_step.skipped == 0
    # The norm itself is out of FP32's range.
    assert optimizer.last_step.grad_norm == torch.finfo(f32).max
    assert all(param.isfinite().all() for param in held)


@pytest.mark.parametrize("scale", [1.0, 2.0**24, 2.0**-8])
def test_the_largest_f16_gradients_are_no_overflow_at_any_scale(scale, device):
    """65504 is finite, and unscaling by a large or a fractional scale keeps it so."""
    param = torch.zeros(30, dtype=f16, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([param], lr=1e-9)
    optim.upgrade(optimizer, master_weights=True)
    optimizer.param_table().gradients.begin_backward()
    param.grad = torch.full((30,), 65504.0, dtype=f16, device=device)
    optimizer.end_backward(torch.tensor(scale, device=device), True)
    optimizer.step()
    assert optimizer.last_step.skipped == 0
    norm = 65504.0 / scale * math.sqrt(30)
    assert float(optimizer.last_step.grad_norm) == pytest.approx(norm, rel=1e-6)


def test_a_gradient_without_versions_is_inspected_again():
    """An inference tensor may have changed since it was inspected."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = optim.AdamW([param], skip_nonfinite=True)
    with torch.inference_mode():
        param.grad = torch.ones(4)
    optimizer.inspect_gradients()
    with torch.inference_mode():
        param.grad.fill_(float("inf"))
    optimizer.step()
    assert float(optimizer.last_step.skipped) == 1
    assert torch.equal(param.detach(), torch.ones(4))
