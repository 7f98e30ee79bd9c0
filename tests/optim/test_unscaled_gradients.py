"""What `.grad` reads after a GradScaler's step: unscaled, as torch's fused steps leave it."""

import math

import pytest
import torch

import ampfuse
from ampfuse.compat.apex import optimizers
from ampfuse.compat.apex.optimizers import FusedAdam
from cases import KINDS, assert_same_bits, bf16, f16, f32, make, same_bits, snapshot

inf = math.inf
CHUNK = 32768
SIZES = (0, 1, 15, 17, CHUNK + 21)


def params(dtype=f32, device="cpu"):
    return [torch.randn(n).to(dtype).to(device).requires_grad_() for n in SIZES]


def give_gradients(parameters, scale, seed=1):
    """Gradients times `scale` to each parameter, and what they are without it."""
    generator = torch.Generator().manual_seed(seed)
    true = [torch.randn(p.shape, generator=generator).to(p.device, p.dtype) for p in parameters]
    for param, gradient in zip(parameters, true, strict=True):
        param.grad = gradient * scale
    return true


def step(optimizer, scale, scaler=ampfuse.GradScaler):
    device = optimizer.param_groups[0]["params"][0].device.type
    scaler = scaler(device, init_scale=scale)
    scaler.scale(torch.ones((), device=device))  # makes its tensors
    scaler.step(optimizer)
    scaler.update()
    return scaler


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_torchs_fused_steps_are_the_model(name):
    """The behaviour that is matched: 2048 becomes 2 at scale 1024."""
    for library, options in ((torch.optim, {"fused": True}), (ampfuse.optim, {})):
        weight = torch.ones(3).requires_grad_()
        weight.grad = torch.full((3,), 2048.0)
        step(getattr(library, name)([weight], lr=0.1, **options), 1024.0)
        assert torch.equal(weight.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("scaler", [ampfuse.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("name", [*KINDS, "adamw-amsgrad", "sgd-maximize"])
def test_they_read_unscaled_and_not_clipped(name, scaler, device):
    parameters = params(device=device)
    optimizer = make(name, parameters, max_grad_norm=0.5)
    for i in range(2):
        true = give_gradients(parameters, 1024.0, seed=i)
        gradients = [param.grad for param in parameters]
        versions = [gradient._version for gradient in gradients]
        step(optimizer, 1024.0, scaler)
        for param, gradient, version, expected in zip(
            parameters, gradients, versions, true, strict=True
        ):
            assert param.grad is gradient
            assert same_bits(gradient, expected)
            assert gradient._version > version


def test_any_scale_divides_as_torchs_unscale(device):
    parameters = params(device=device)
    true = give_gradients(parameters, 1.0)
    step(make("sgd", parameters), 1000.0)
    inverse = torch.tensor(1000.0, dtype=torch.float64).reciprocal().float().to(device)
    for param, gradient in zip(parameters, true, strict=True):
        assert same_bits(param.grad, gradient * inverse)


@pytest.mark.parametrize("name", KINDS)
def test_leaving_them_scaled_changes_nothing_else(name, device):
    found = []
    for unscale_grads in (True, False):
        torch.manual_seed(0)
        parameters = params(device=device)
        optimizer = make(name, parameters, unscale_grads=unscale_grads, max_grad_norm=0.5)
        for i in range(3):
            true = give_gradients(parameters, 1024.0, seed=i)
            step(optimizer, 1024.0)
        found.append(snapshot(optimizer))
    assert_same_bits(*found)
    for param, expected in zip(parameters, true, strict=True):
        assert same_bits(param.grad, expected * 1024)


@pytest.mark.parametrize("dtype", [f16, bf16])
def test_half_gradients_are_not_rewritten(dtype, device):
    """To unscale them in half would lose small ones; FP32 ones beside them read unscaled."""
    parameters = [*params(dtype, device), *params(f32, device)]
    true = give_gradients(parameters, 64.0)
    versions = [param.grad._version for param in parameters]
    step(make("adamw", parameters, master_weights=True), 64.0)
    for i, (param, gradient) in enumerate(zip(parameters, true, strict=True)):
        half = i < len(SIZES)
        assert same_bits(param.grad, gradient * 64 if half else gradient)
        assert (param.grad._version == versions[i]) == half


@pytest.mark.parametrize("dtype", [f32, f16, bf16])
@pytest.mark.parametrize("capturable", [True, False])
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("scaler", [ampfuse.GradScaler, torch.amp.GradScaler])
def test_apexs_capturable_adam_rounds_half_ones(dtype, capturable, masters, scaler, device):
    """As its kernel did; what the step makes of them is not changed by that."""
    if scaler is torch.amp.GradScaler and dtype == bf16 and device.type == "cuda":
        pytest.skip("torch checks no BF16 gradients on CUDA")
    options = {"capturable": capturable, "master_weights": masters and capturable}
    parameters = [*params(dtype, device), *params(f32, device)]
    twins = [p.detach().clone().requires_grad_() for p in parameters]
    optimizer = FusedAdam(parameters, **options)
    reference = make("adamw", twins, lr=1e-3, weight_decay=0.0, **options)
    scale = 3000.0
    inverse = torch.tensor(scale, dtype=torch.float64).reciprocal().float().to(device)
    for i in range(2):
        give_gradients(parameters, scale, seed=i)
        carried = [param.grad.clone() for param in parameters]
        versions = [param.grad._version for param in parameters]
        for twin, gradient in zip(twins, carried, strict=True):
            twin.grad = gradient.clone()
        step(optimizer, scale, scaler)
        step(reference, scale, scaler)
        for j, (param, gradient) in enumerate(zip(parameters, carried, strict=True)):
            unscaled = capturable or param.dtype == f32
            expected = (gradient.float() * inverse).to(gradient.dtype) if unscaled else gradient
            assert same_bits(param.grad, expected)
            assert (param.grad._version > versions[j]) == unscaled
    assert_same_bits(snapshot(optimizer), snapshot(reference))
    give_gradients(parameters, scale)
    parameters[3].grad[2] = inf
    before = [param.grad.clone() for param in parameters]
    step(optimizer, scale, scaler)
    assert all(same_bits(p.grad, b) for p, b in zip(parameters, before, strict=True))


@pytest.mark.parametrize("optimizer", ["FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad"])
def test_apexs_others_do_not(optimizer):
    parameters = params(f16)
    true = give_gradients(parameters, 1024.0)
    step(getattr(optimizers, optimizer)(parameters, lr=0.1), 1024.0)
    assert all(same_bits(p.grad, g * 1024) for p, g in zip(parameters, true, strict=True))


def test_an_overflow_leaves_them_as_they_were(device):
    parameters = params(device=device)
    optimizer = make("adamw", parameters)
    give_gradients(parameters, 1024.0)
    parameters[3].grad[2] = inf
    before = [param.grad.clone() for param in parameters]
    assert step(optimizer, 1024.0).get_scale() == 512.0
    assert all(same_bits(p.grad, b) for p, b in zip(parameters, before, strict=True))


def test_gradients_unscaled_before_stay(device):
    parameters = params(device=device)
    optimizer = make("adamw", parameters)
    true = give_gradients(parameters, 1024.0)
    scaler = ampfuse.GradScaler(parameters[0].device.type, init_scale=1024.0)
    scaler.scale(torch.ones((), device=device))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert all(same_bits(p.grad, g) for p, g in zip(parameters, true, strict=True))


def test_a_gradient_of_another_layout(device):
    for dtype in (f32, f16):
        weight = torch.randn(5, 7).to(device, dtype).requires_grad_()
        true = torch.randn(7, 5).to(device, dtype).t()
        weight.grad = true * 1024
        step(FusedAdam([weight], capturable=True), 1024.0)
        assert torch.equal(weight.grad, true)


def test_without_a_scaler_gradients_are_not_written(device):
    parameters = params(device=device)
    optimizer = make("adamw", parameters, max_grad_norm=0.5)
    give_gradients(parameters, 1024.0)
    step(optimizer, 1024.0)
    give_gradients(parameters, 1.0)
    versions = [param.grad._version for param in parameters]
    optimizer.step()
    assert [param.grad._version for param in parameters] == versions
