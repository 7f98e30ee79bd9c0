"""``apex.optimizers`` and ``apex.normalization``: arguments, and state dicts in both formats."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ampfuse.compat.apex.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
)
from ampfuse.compat.apex.optimizers import FusedAdam, FusedSGD

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32


def params(dtype=f32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 4).to(dtype)), nn.Parameter(torch.randn(5).to(dtype))]


def run(optimizer, ps, steps=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in ps:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


PAIRS = {
    "adamw": (
        lambda p: FusedAdam(p, 1e-2, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    ),
    "adam": (
        lambda p: FusedAdam(p, 1e-2, adam_w_mode=False, weight_decay=0.1, betas=(0.8, 0.9)),
        lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1, betas=(0.8, 0.9)),
    ),
    "adam by position": (
        lambda p: FusedAdam(p, 1e-2, True, (0.8, 0.9), 1e-6, False, 0.1, False, False),
        lambda p: torch.optim.Adam(p, 1e-2, (0.8, 0.9), 1e-6, 0.1),
    ),
    "sgd": (
        lambda p: FusedSGD(p, 0.1, 0.9, 0.0, 0.01, True),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.0, 0.01, True),
    ),
    "sgd of groups": (
        lambda p: FusedSGD([{"params": p, "lr": 0.1}], momentum=0.5, dampening=0.2),
        lambda p: torch.optim.SGD(p, 0.1, 0.5, 0.2),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_they_step_as_torchs(name):
    make, make_torch = PAIRS[name]
    ours, theirs = params(), params()
    run(make(ours), ours)
    run(make_torch(theirs), theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda p: FusedAdam(p, amsgrad=True), RuntimeError),
        (lambda p: FusedAdam(p, master_weights=True), RuntimeError),
        (lambda p: FusedSGD(p), ValueError),
        (lambda p: FusedSGD(p, lr=-1.0), ValueError),
        (lambda p: FusedSGD(p, lr=1.0, momentum=-1.0), ValueError),
        (lambda p: FusedSGD(p, lr=1.0, weight_decay=-1.0), ValueError),
        (lambda p: FusedSGD(p, lr=1.0, nesterov=True), ValueError),
        (lambda p: FusedSGD(p, lr=1.0, momentum=0.9, dampening=0.1, nesterov=True), ValueError),
    ],
)
def test_errors(make, error):
    with pytest.raises(error):
        make(params())


@pytest.mark.parametrize("name", ["grads", "output_params", "scale", "grad_norms"])
def test_arguments_that_apex_gave_up(name):
    with pytest.raises(RuntimeError, match=name):
        FusedAdam(params()).step(**{name: 1})
    with pytest.raises(TypeError, match="nonsense"):
        FusedAdam(params()).step(nonsense=1)


@pytest.mark.parametrize("make", [lambda p: FusedAdam(p), lambda p: FusedSGD(p, lr=0.1)])
def test_zero_grad(make):
    """apex's took no argument."""
    ps = params()
    optimizer = make(ps)
    for given, dropped in ((None, type(optimizer) is FusedAdam), (True, True), (False, False)):
        for p in ps:
            p.grad = torch.ones_like(p)
        optimizer.zero_grad() if given is None else optimizer.zero_grad(set_to_none=given)
        assert all((p.grad is None) == dropped for p in ps)
        assert dropped or not any(p.grad.any() for p in ps)


def test_a_group_added_later_is_stepped():
    """apex's FusedAdam never updated it."""
    ps = params()
    optimizer = FusedAdam(ps[:1])
    run(optimizer, ps[:1], steps=1)
    optimizer.add_param_group({"params": ps[1:]})
    before = ps[1].detach().clone()
    run(optimizer, ps, steps=1)
    assert not torch.equal(ps[1], before)


def test_a_gradient_that_comes_later_starts_its_own_momentum():
    """apex's FusedSGD started the momentum of all anew, or left this one out."""
    ps, theirs = params(), params()
    for optimizer, those in (
        (FusedSGD(ps, 0.1, 0.9), ps),
        (torch.optim.SGD(theirs, 0.1, 0.9), theirs),
    ):
        for present in ((0,), (0, 1), (0, 1)):
            for i, p in enumerate(those):
                p.grad = torch.full_like(p, 0.5) if i in present else None
            optimizer.step()
    for a, b in zip(ps, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_masters():
    ps = params(f16)
    optimizer = FusedAdam(ps, capturable=True, master_weights=True)
    run(optimizer, ps)
    for p in ps:
        master = optimizer.state[p]["master_param"]
        assert master.dtype == f32
        assert torch.equal(master.half(), p)


@pytest.mark.parametrize("found", [False, True])
def test_step_with_a_grad_scaler(found):
    ps, plain = params(), params()
    optimizer, reference = FusedAdam(ps), FusedAdam(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.zeros(()))
    for p, q in zip(ps, plain, strict=True):
        q.grad = torch.ones_like(q)
        p.grad = q.grad * (float("inf") if found else 1024.0)
    before = ps[0].detach().clone()
    optimizer.step(grad_scaler=scaler)
    reference.step()
    expected = before if found else plain[0]
    torch.testing.assert_close(ps[0], expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for p in ps:
            p.grad = torch.ones_like(p)
        scaler.step(optimizer)


# --- state dicts --------------------------------------------------------------------------------


def as_apex(state):
    """The same state as apex's FusedAdam saved it: steps in the groups, and few keys."""
    state = copy.deepcopy(state)
    (step,) = {float(entry.pop("step")) for entry in state["state"].values()}
    keys = ("lr", "betas", "eps", "weight_decay", "params")
    groups = [{key: group[key] for key in keys} for group in state["param_groups"]]
    for group in groups:
        group.update(bias_correction=True, step=int(step))
    return {"state": state["state"], "param_groups": groups}


@pytest.mark.parametrize("source", ["apex", "torch", "ampfuse"])
def test_adam_goes_on_from_any_state(source):
    ps = params()
    kind = torch.optim.AdamW if source == "torch" else FusedAdam
    optimizer = kind(ps, 1e-2, weight_decay=0.1)
    run(optimizer, ps)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    if source == "apex":
        saved = as_apex(saved)
    untouched = copy.deepcopy(saved)
    again = [nn.Parameter(p.detach().clone()) for p in ps]
    resumed = FusedAdam(again, 1e-2, weight_decay=0.1)
    resumed.load_state_dict(saved)
    assert str(saved) == str(untouched)
    run(optimizer, ps, seed=2)
    run(resumed, again, seed=2)
    for a, b in zip(ps, again, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_state_of_apex_keeps_the_mode_of_the_decay():
    ps = params()
    optimizer = FusedAdam(ps, adam_w_mode=True)
    run(optimizer, ps)
    saved = as_apex(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True
    fresh = FusedAdam(params())  # saved before the first step: a count, but no moments
    fresh.load_state_dict({**saved, "state": {}})
    run(fresh, fresh.param_groups[0]["params"], steps=1)


@pytest.mark.parametrize("dtype", [f16, bf16])
def test_moments_of_half_parameters_stay_fp32(dtype):
    """apex's came back in half and were then read as FP32."""
    ps = params(dtype)
    optimizer = FusedAdam(ps)
    run(optimizer, ps)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    for i, p in enumerate(ps):
        assert optimizer.state[p]["exp_avg_sq"].dtype == f32
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], saved["state"][i]["exp_avg_sq"])


def test_sgd_loads_torchs_state_and_apexs():
    ps, theirs = params(), params()
    reference = torch.optim.SGD(theirs, 0.1, 0.9)
    run(reference, theirs)
    saved = reference.state_dict()
    keys = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "params")
    few = {**saved, "param_groups": [{k: g[k] for k in keys} for g in saved["param_groups"]]}
    for state in (saved, few):
        ps = [nn.Parameter(p.detach().clone()) for p in theirs]
        optimizer = FusedSGD(ps, 0.1, 0.9)
        optimizer.load_state_dict(copy.deepcopy(state))
        twin = [nn.Parameter(p.detach().clone()) for p in theirs]
        other = torch.optim.SGD(twin, 0.1, 0.9)
        other.load_state_dict(copy.deepcopy(saved))
        run(optimizer, ps, seed=2)
        run(other, twin, seed=2)
        for a, b in zip(ps, twin, strict=True):
            torch.testing.assert_close(a, b)


# --- normalization ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [6, (6,), [2, 6]])
def test_norms_are_torchs(shape):
    x = torch.rand(3, 2, 6)
    for ours, theirs in ((FusedLayerNorm, nn.LayerNorm), (FusedRMSNorm, nn.RMSNorm)):
        for affine in (True, False):
            module = ours(shape, elementwise_affine=affine, memory_efficient=True)
            reference = theirs(shape, eps=1e-5, elementwise_affine=affine)
            assert torch.equal(module(x), reference(x))
            assert module.state_dict().keys() == reference.state_dict().keys()
    assert torch.equal(fused_layer_norm(x, 6), F.layer_norm(x, (6,), eps=1e-6))
    assert torch.equal(fused_rms_norm(x, 6), F.rms_norm(x, (6,), eps=1e-6))


@pytest.mark.parametrize("x", [f16, bf16, f32])
@pytest.mark.parametrize("weights", [f16, bf16, f32])
def test_types_of_norms(x, weights):
    data = torch.rand(3, 6).to(x)
    for plain, mixed in ((FusedLayerNorm, MixedFusedLayerNorm), (FusedRMSNorm, MixedFusedRMSNorm)):
        exact = plain(6)(data.float())
        for kind, out in ((plain, x), (mixed, weights)):
            result = kind(6).to(weights)(data)
            assert result.dtype == out
            torch.testing.assert_close(result.float(), exact, rtol=0.02, atol=0.02)
    weight, bias = torch.rand(6).to(weights), torch.rand(6).to(weights)
    assert fused_layer_norm_affine(data, weight, bias, 6).dtype == x
    assert fused_rms_norm_affine(data, weight, 6).dtype == x
    with pytest.raises(RuntimeError, match="weights"):
        MixedFusedLayerNorm(6, elementwise_affine=False)


@pytest.mark.parametrize("make", [lambda p: FusedAdam(p, 0.1), lambda p: FusedSGD(p, 0.1)])
def test_an_empty_first_group(make):
    """apex's raised IndexError."""
    ps = params()
    optimizer = make([{"params": []}, {"params": ps}])
    before = ps[0].detach().clone()
    run(optimizer, ps, steps=1)
    assert not torch.equal(ps[0], before)
