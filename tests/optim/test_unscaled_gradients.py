"""`.grad` after a GradScaler's step is unscaled, as torch's fused steps leave it."""

import copy

import pytest
import torch

import ampfuse
from ampfuse.compat.apex import optimizers
from ampfuse.compat.apex.optimizers import FusedAdam
from cases import (
    CHUNK,
    KINDS,
    assert_same_bits,
    bf16,
    f16,
    f32,
    give_gradients,
    make,
    parameters,
    same_bits,
    snapshot,
)

SIZES = (0, 1, 15, 17, CHUNK + 21)
SCALE = 1024.0


def params(*dtypes, device="cpu"):
    """All sizes, of one type after the other."""
    shapes = [(n,) for n in SIZES]
    return [p for dtype in dtypes or (f32,) for p in parameters(shapes, dtype, device=device)]


def step(optimizer, scale=SCALE, scaler=ampfuse.GradScaler):
    device = optimizer.param_groups[0]["params"][0].device.type
    scaler = scaler(device, init_scale=scale)
    scaler.scale(torch.ones((), device=device))  # makes its tensors
    scaler.step(optimizer)
    scaler.update()
    return scaler


def versions(held):
    return [param.grad._version for param in held]


def assert_gradients(held, expected):
    assert all(same_bits(p.grad, g) for p, g in zip(held, expected, strict=True))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_torchs_fused_steps_are_the_model(name):
    """The behaviour that is matched: 2048 becomes 2 at scale 1024."""
    for library, options in ((torch.optim, {"fused": True}), (ampfuse.optim, {})):
        weight = torch.ones(3).requires_grad_()
        weight.grad = torch.full((3,), 2048.0)
        step(getattr(library, name)([weight], lr=0.1, **options))
        assert torch.equal(weight.grad, torch.full((3,), 2.0))


@pytest.mark.covers(1)
@pytest.mark.parametrize("scaler", [ampfuse.GradScaler, torch.amp.GradScaler])
@pytest.mark.parametrize("name", [*KINDS, "adamw-amsgrad", "sgd-maximize"])
def test_they_read_unscaled_and_not_clipped(name, scaler, device):
    held = params(device=device)
    optimizer = make(name, held, max_grad_norm=0.5)
    for i in range(2):
        true = give_gradients(held, i, SCALE)
        gradients, before = [param.grad for param in held], versions(held)
        step(optimizer, scaler=scaler)
        assert_gradients(held, true)
        assert all(p.grad is g for p, g in zip(held, gradients, strict=True))
        assert all(now > was for now, was in zip(versions(held), before, strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_leaving_them_scaled_changes_nothing_else(name, device):
    held = params(device=device)
    left = copy.deepcopy(held)
    optimizers = [
        make(name, those, max_grad_norm=0.5, unscale_grads=those is held) for those in (held, left)
    ]
    for i in range(3):
        for those, optimizer in zip((held, left), optimizers, strict=True):
            true = give_gradients(those, i, SCALE)
            step(optimizer)
    assert_same_bits(*map(snapshot, optimizers))
    assert_gradients(left, [gradient * SCALE for gradient in true])


@pytest.mark.covers(2)
@pytest.mark.parametrize("dtype", [f32, f16, bf16])
@pytest.mark.parametrize("capturable", [True, False])
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("scaler", [ampfuse.GradScaler, torch.amp.GradScaler])
def test_apexs_capturable_adam_rounds_half_ones(dtype, capturable, masters, scaler, device):
    """Its kernel did so too; the result of the step does not change."""
    if scaler is torch.amp.GradScaler and dtype == bf16 and device.type == "cuda":
        pytest.skip("torch checks no BF16 gradients on CUDA")
    options = {"capturable": capturable, "master_weights": masters and capturable}
    held = params(dtype, f32, device=device)
    twins = copy.deepcopy(held)
    optimizer = FusedAdam(held, **options)
    reference = make("adamw", twins, lr=1e-3, weight_decay=0.0, **options)
    scale = 3000.0
    inverse = torch.tensor(scale, dtype=torch.float64).reciprocal().float().to(device)
    for i in range(2):
        give_gradients(held, i, scale)
        give_gradients(twins, i, scale)
        carried, before = [param.grad.clone() for param in held], versions(held)
        step(optimizer, scale, scaler)
        step(reference, scale, scaler)
        unscaled = [capturable or gradient.dtype == f32 for gradient in carried]
        expected = [
            (gradient.float() * inverse).to(gradient.dtype) if is_unscaled else gradient
            for gradient, is_unscaled in zip(carried, unscaled, strict=True)
        ]
        assert_gradients(held, expected)
        assert [now > was for now, was in zip(versions(held), before, strict=True)] == unscaled
    assert_same_bits(snapshot(optimizer), snapshot(reference))
    give_gradients(held, scale=scale)
    held[3].grad[2] = torch.inf
    before = [param.grad.clone() for param in held]
    step(optimizer, scale, scaler)
    assert_gradients(held, before)


@pytest.mark.parametrize("optimizer", ["FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad"])
def test_apexs_others_do_not(optimizer):
    held = params(f16)
    true = give_gradients(held, scale=SCALE)
    step(getattr(optimizers, optimizer)(held, lr=0.1))
    assert_gradients(held, [gradient * SCALE for gradient in true])


def test_gradients_unscaled_before_stay(device):
    held = params(device=device)
    optimizer = make("adamw", held)
    true = give_gradients(held, scale=SCALE)
    scaler = ampfuse.GradScaler(device.type, init_scale=SCALE)
    scaler.scale(torch.ones((), device=device))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert_gradients(held, true)


@pytest.mark.parametrize("dtype", [f32, f16])
def test_a_gradient_of_another_layout_is_unscaled(dtype, device):
    weight = torch.randn(5, 7).to(device, dtype).requires_grad_()
    true = torch.randn(7, 5).to(device, dtype).t()
    weight.grad = true * SCALE
    step(FusedAdam([weight], capturable=True))
    assert torch.equal(weight.grad, true)


def test_without_a_scaler_gradients_are_not_written(device):
    held = params(device=device)
    optimizer = make("adamw", held, max_grad_norm=0.5)
    give_gradients(held, scale=SCALE)
    step(optimizer)
    give_gradients(held)
    before = versions(held)
    optimizer.step()
    assert versions(held) == before
