"""A non-finite gradient skips the whole step, wherever it is; a huge finite one does not."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from ampfuse import optim
from cases import KINDS, OPTIMIZERS, assert_same_bits, bf16, f16, f32, f64, make, snapshot

inf, nan = math.inf, math.nan
CHUNK = 32768
SIZES = (1, 40, CHUNK + 21)
# Where in the last tensor: its ends, within a vector, at the chunk boundary, in the remainder.
PLACES = (0, 7, 16, CHUNK - 1, CHUNK, CHUNK + 16, CHUNK + 20)


def params(dtype, device="cpu", sizes=SIZES):
    return [torch.randn(n).to(dtype).to(device).requires_grad_() for n in sizes]


def new_gradients(parameters, scale=1.0):
    for param in parameters:
        param.grad = torch.randn_like(param) * scale


def with_steps(name, dtype, device="cpu", **options):
    """An optimizer that has made two clean steps, so that all of its state exists."""
    parameters = params(dtype, device)
    options = {"master_weights": dtype != f32, "skip_nonfinite": True, **options}
    optimizer = make(name, parameters, **options)
    for _ in range(2):
        new_gradients(parameters)
        optimizer.step()
    return parameters, optimizer


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
    parameters, optimizer = with_steps(name, dtype, device)
    assert optimizer.last_step.skipped == 0
    for place in PLACES:
        new_gradients(parameters)
        parameters[-1].grad[place] = bad
        assert_skips(optimizer)
    for i in (0, 1):  # tensors of less than a vector, and not the last
        new_gradients(parameters)
        parameters[i].grad[-1] = bad
        assert_skips(optimizer)
    before = snapshot(optimizer)
    new_gradients(parameters)
    optimizer.step()  # and the next clean step is made
    assert optimizer.last_step.skipped == 0
    after = snapshot(optimizer)
    stepped = "param" if dtype == f32 else "master_param"
    for i in range(len(SIZES)):
        assert not torch.equal(after[f"{stepped} {i}"], before[f"{stepped} {i}"])


@given(
    place=st.integers(0, SIZES[-1] - 1),
    bad=st.sampled_from([inf, -inf, nan]),
    dtype=st.sampled_from([f32, f16, bf16]),
    threads=st.sampled_from([1, 2]),
)
def test_a_bad_value_in_any_place_skips_the_step(place, bad, dtype, threads):
    torch.manual_seed(1)
    torch.set_num_threads(threads)
    parameters = params(dtype)
    optimizer = make("adamw", parameters, master_weights=True, skip_nonfinite=True)
    new_gradients(parameters)
    parameters[-1].grad[place] = bad
    before = [param.detach().clone() for param in parameters]
    optimizer.step()
    torch.set_num_threads(1)
    assert optimizer.last_step.skipped == 1
    assert all(torch.equal(p.detach(), b) for p, b in zip(parameters, before, strict=True))


def test_one_bad_tensor_of_many_skips_the_step(device):
    parameters = [torch.randn(i % 7, device=device).requires_grad_() for i in range(2000)]
    optimizer = make("adamw", parameters, skip_nonfinite=True)
    for i in (1, 999, 1998):
        new_gradients(parameters)
        parameters[i].grad[-1:] = inf
        has_elements = parameters[i].numel() > 0
        optimizer.step()
        assert optimizer.last_step.skipped == float(has_elements)


@pytest.mark.parametrize("name", KINDS)
def test_a_skipped_first_step_leaves_no_trace(name, device):
    """SGD's buffer starts as the first applied gradient, Adam counts applied steps."""
    parameters = params(f32, device)
    twins = [param.detach().clone().requires_grad_() for param in parameters]
    ours, twin = make(name, parameters, skip_nonfinite=True), make(name, twins)
    new_gradients(parameters)
    parameters[1].grad[3] = nan
    ours.step()
    for _ in range(3):
        new_gradients(parameters)
        for param, other in zip(parameters, twins, strict=True):
            other.grad = param.grad.clone()
        ours.step()
        twin.step()
    assert_same_bits(snapshot(ours), snapshot(twin))


# --- who skips -----------------------------------------------------------------------------------


def test_a_bad_value_propagates_as_in_torch_if_nothing_asks_to_skip(device):
    parameters = params(f32, device)
    optimizer = make("adamw", parameters)
    new_gradients(parameters)
    parameters[1].grad[5] = nan
    optimizer.step()
    assert optimizer.last_step.skipped == 0
    assert parameters[1].isnan().nonzero().tolist() == [[5]]
    assert parameters[0].isfinite().all()


@pytest.mark.parametrize("options", [{"skip_nonfinite": True}, {"max_grad_norm": 1.0}])
def test_options_that_ask_to_skip_make_a_bad_value_skip_the_step(options, device):
    parameters = params(f32, device)
    optimizer = make("adamw", parameters, **options)
    new_gradients(parameters)
    optimizer.step()
    new_gradients(parameters)
    parameters[1].grad[5] = inf
    assert_skips(optimizer)


def test_a_static_scale_never_skips(device):
    """Under amp with a static loss scale, as in apex."""
    param = torch.ones(20, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([param], lr=1.0)
    optim.upgrade(optimizer, master_weights=False)
    optimizer.skip_on_overflow = False
    optimizer.begin_backward()
    param.grad = torch.full((20,), 8.0, device=device)
    param.grad[3] = inf
    optimizer.end_backward(torch.tensor(8.0, device=device), False)
    optimizer.step()
    assert optimizer.last_step.skipped == 0
    assert param[3] == -inf
    assert torch.equal(param[4:].detach(), torch.zeros(16, device=device))


# --- the report ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "kind"), [(inf, "inf"), (-inf, "inf"), (nan, "nan")])
def test_the_report_names_parameter_kind_and_number_of_skipped_steps(bad, kind, device):
    named = [("head.weight", torch.randn(5, device=device).requires_grad_())]
    named += [("body.weight", torch.randn(50, device=device).requires_grad_())]
    optimizer = optim.AdamW(named, skip_nonfinite=True)
    parameters = [param for _, param in named]
    new_gradients(parameters)
    optimizer.step()
    assert optimizer.last_step.overflow() is None
    for skipped in (1, 2):
        new_gradients(parameters)
        named[1][1].grad[30] = bad
        optimizer.step()
        report = {"parameter": "body.weight", "kind": kind, "skipped_steps": skipped}
        assert optimizer.last_step.overflow() == report
    new_gradients(parameters)
    optimizer.step()
    # The latest overflow stays known after clean steps.
    assert optimizer.last_step.overflow() == report
    assert optimizer.last_step.skipped == 0


def test_the_report_names_the_first_of_several(device):
    parameters = params(f32, device)
    optimizer = make("sgd-all", parameters, skip_nonfinite=True)
    new_gradients(parameters)
    parameters[2].grad[CHUNK + 3] = inf
    parameters[1].grad[2] = nan
    optimizer.step()
    report = optimizer.last_step.overflow()
    assert report["parameter"] == "param_groups[0]['params'][1] of shape (40,)"
    assert report["kind"] == "nan"


# --- huge and tiny gradients ---------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_bf16_1e20_is_no_overflow_and_clips_right(name, device):
    parameters = params(bf16, device)
    optimizer = make(name, parameters, master_weights=True, max_grad_norm=1.0)
    rule = reference.RULES[type(optimizer).__name__](**OPTIMIZERS[name][1])
    new_gradients(parameters, 1e20)
    grads = [param.grad.cpu() for param in parameters]
    norm = reference.norm(grads)
    coefficient = reference.clip_coefficient(norm, 1.0)
    start = [param.detach().cpu().to(f64) for param in parameters]
    optimizer.step()
    assert optimizer.last_step.skipped == 0
    assert float(optimizer.last_step.grad_norm) == pytest.approx(norm, rel=1e-6)
    for param, grad, p in zip(parameters, grads, start, strict=True):
        exact = rule.step(p, grad.to(f64) * coefficient, {})
        found = optimizer.state[param]["master_param"].cpu().to(f64)
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-25, 1e-7, 1e18, 1e25, 1e36])
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_norm_of_finite_gradients_of_any_magnitude_is_accurate(magnitude, dtype, device):
    parameters = params(dtype, device)
    optimizer = make("sgd", parameters, max_grad_norm=inf)
    new_gradients(parameters, magnitude)
    norm = reference.norm([param.grad.cpu() for param in parameters])
    optimizer.step()
    assert optimizer.last_step.skipped == 0
    # Near the smallest subnormal FP32 itself has few digits.
    assert float(optimizer.last_step.grad_norm) == pytest.approx(norm, rel=1e-5, abs=2e-45)


def test_the_largest_finite_gradients_are_no_overflow(device):
    parameters = params(f32, device)
    optimizer = make("sgd", parameters, max_grad_norm=1.0)
    for param in parameters:
        param.grad = torch.full_like(param, torch.finfo(f32).max)
    optimizer.step()
    assert optimizer.last_step.skipped == 0
    # The norm itself is out of FP32's range.
    assert optimizer.last_step.grad_norm == torch.finfo(f32).max
    assert all(param.isfinite().all() for param in parameters)


@pytest.mark.parametrize("scale", [1.0, 2.0**24, 2.0**-8])
def test_the_largest_f16_gradients_are_no_overflow_at_any_scale(scale, device):
    """65504 is finite, and unscaling by a large or a fractional scale keeps it so."""
    param = torch.zeros(30, dtype=f16, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([param], lr=1e-9)
    optim.upgrade(optimizer, master_weights=True)
    optimizer.begin_backward()
    param.grad = torch.full((30,), 65504.0, dtype=f16, device=device)
    optimizer.end_backward(torch.tensor(scale, device=device), True)
    optimizer.step()
    assert optimizer.last_step.skipped == 0
    norm = 65504.0 / scale * math.sqrt(30)
    assert float(optimizer.last_step.grad_norm) == pytest.approx(norm, rel=1e-6)
