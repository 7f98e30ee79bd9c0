"""LARC around optimizers of ours, of torch and under amp, against its rule in float64."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

import reference
from ampfuse import amp, optim
from cases import (
    LEVELS,
    assert_same_bits,
    bf16,
    copy_weights,
    f64,
    give_gradients,
    parameters,
    params_of,
    snapshot,
    train,
    weights,
)

SHAPES = ((40, 50), (7,), (33000,), (0,), (3, 5))
# name: the optimizer, its rule, and options of both
INNER = {
    "ours-sgd": (optim.SGD, "SGD", {"momentum": 0.9}),
    "torch-sgd": (torch.optim.SGD, "SGD", {"momentum": 0.9}),
    "ours-adam": (optim.Adam, "Adam", {}),
    "ours-adamw": (optim.AdamW, "Adam", {}),  # the decay goes through the gradient
    "torch-adagrad": (torch.optim.Adagrad, "Adagrad", {}),
    "ours-adagrad": (optim.Adagrad, "Adagrad", {}),
}


@pytest.mark.covers(2)
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("name", "lr"),
    [
        *itertools.product(INNER, (0.001, 0.1)),
        # Not torch-adagrad, which is torch's own step.
        *((name, torch.tensor(0.1)) for name in INNER if name != "torch-adagrad"),
    ],
)
def test_steps_follow_the_rule_in_float64(name, lr, decay, clip, device):
    kind, rule, options = INNER[name]
    params = parameters(SHAPES, device=device)
    params[1].data.zero_()  # a norm of zero
    number = float(lr)
    inner = kind(params, lr=lr, weight_decay=decay, **options)
    larc = optim.LARC(inner, trust_coefficient=0.3, clip=clip)
    exact = [param.detach().cpu().to(f64) for param in params]
    states = [{} for _ in params]
    for _ in range(3):
        for i, grad in enumerate(give_gradients(params)):
            grad = reference.layerwise(exact[i], grad.cpu(), number, decay, 0.3, clip=clip)
            exact[i] = reference.RULES[rule](lr=number, **options).step(exact[i], grad, states[i])
        kept = [param.grad.clone() for param in params]
        larc.step()
        if name.startswith("ours"):
            assert all(torch.equal(p.grad, g) for p, g in zip(params, kept, strict=True))
        assert inner.param_groups[0]["weight_decay"] == decay
    for param, value in zip(params, exact, strict=True):
        torch.testing.assert_close(param.detach().cpu().to(f64), value, rtol=3e-5, atol=3e-6)


def twins(count, **options):
    """LARC around the same parameters of ours, with options and without."""
    params = parameters([(50,)] * count)
    both = (params, options), (copy.deepcopy(params), {})
    return [optim.LARC(optim.SGD(p, lr=0.1, weight_decay=0.1, **more)) for p, more in both]


def assert_close(larc, other, **bounds):
    for param, twin in zip(params_of(larc), params_of(other), strict=True):
        torch.testing.assert_close(param, twin, **bounds)


def test_gradients_are_clipped_before_the_rates():
    ours, other = twins(2, max_grad_norm=0.5)
    for larc in (ours, other):
        give_gradients(params_of(larc), 0)
    torch.nn.utils.clip_grad_norm_(params_of(other), 0.5)
    ours.step()
    other.step()
    assert_close(ours, other)


def amp_run(inner, level, when, clip=True, **options):
    """(larc, masters, one pass of a model under amp), wrapped before or after ``initialize``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    nn.init.zeros_(model[0].bias)
    optimizer = getattr(torch.optim, inner)(model.parameters(), lr=0.05, weight_decay=0.1)
    if when == "before":
        optimizer = optim.LARC(optimizer, 0.3, clip)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    larc = optimizer if when == "before" else optim.LARC(optimizer, 0.3, clip)
    assert isinstance(larc.optim, optim.AmpOptimizer)  # one that is not fused runs its own step
    x = torch.randn(64, 8)

    def one_pass(factor=1.0):
        larc.zero_grad()
        with amp.scale_loss(model(x).float().square().mean() * factor, larc) as scaled:
            scaled.backward()

    return larc, list(amp.master_params(larc)), one_pass


@pytest.mark.covers(2)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("inner", ["SGD", "RMSprop"])
def test_the_rule_applies_to_unscaled_gradients_and_masters_under_amp(inner, clip, level):
    """On unscaled gradients and masters; a weight of zeros and a gradient of zeros among them."""
    larc, masters, one_pass = amp_run(inner, level, "before", clip, loss_scale=128.0)
    states = [torch.zeros_like(p, dtype=f64) for p in masters]
    for _ in range(2):
        one_pass()
        masters[2].grad.zero_()
        exact = []
        for i, p in enumerate(masters):
            g = reference.layerwise(p, p.grad, 0.05, 0.1, 0.3, clip=clip)
            if inner == "RMSprop":
                states[i] = 0.99 * states[i] + 0.01 * g**2
                g = g / (states[i].sqrt() + 1e-8)
            exact.append(p.detach().to(f64) - 0.05 * g)
        larc.step()
        assert larc.param_groups[0]["weight_decay"] == 0.1
        tolerance = {"O3": 2e-3, "O5": 2e-2}.get(level, 1e-5)
        if inner == "RMSprop" and level in ("O3", "O5"):
            continue  # torch's own step, of half state
        for p, e in zip(masters, exact, strict=True):
            torch.testing.assert_close(p.detach().to(f64), e, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("inner", ["SGD", "AdamW", "RMSprop"])
def test_before_and_after_initialize_are_the_same(inner, level):
    """With schedules, overflows and a checkpoint in between, bit by bit."""
    snapshots = []
    for when in ("before", "after"):
        larc, masters, one_pass = amp_run(inner, level, when, loss_scale="dynamic")
        schedule = torch.optim.lr_scheduler.StepLR(larc, 1, gamma=0.9)
        for factor in (1.0, float("inf"), 1.0):
            one_pass(factor)
            before = snapshot(larc)
            larc.step()
            if factor != 1.0:
                assert_same_bits(snapshot(larc), before)
            schedule.step()
        saved = copy.deepcopy(larc.state_dict())
        kept = weights(masters)
        one_pass()
        larc.step()
        copy_weights(kept, masters)
        larc.load_state_dict(saved)
        one_pass()
        larc.step()
        snapshots.append(snapshot(larc))
    assert_same_bits(snapshots[0], snapshots[1])


class _Failing(torch.optim.SGD):
    def step(self, closure=None):
        assert self.param_groups[0]["weight_decay"] == 0.0
        raise KeyError("out of luck")


@pytest.mark.parametrize("under_amp", [False, True])
def test_weight_decay_comes_back_when_the_step_raises(under_amp):
    """It stayed 0 in apex."""
    model = nn.Linear(3, 1)
    larc = optim.LARC(_Failing(model.parameters(), lr=0.1, weight_decay=0.1))
    if under_amp:
        model, larc = amp.initialize(model, larc, opt_level="O2", loss_scale=1.0, verbosity=0)
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(KeyError, match="out of luck"):
        larc.step()
    assert larc.param_groups[0]["weight_decay"] == 0.1


def test_a_step_that_raises_leaves_the_wrapped_optimizer_as_it_was():
    larc, other = twins(1)

    def closure():
        raise KeyError("out of luck")

    with pytest.raises(KeyError):
        larc.step(closure)
    train(larc.optim)
    train(other.optim)
    assert torch.equal(*params_of(larc), *params_of(other))


@pytest.mark.parametrize("copy_", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_keep_the_settings_of_larc(copy_):
    param = torch.randn(5, requires_grad=True)
    larc = optim.LARC(optim.AdamW([param], lr=0.1, master_weights=True), 0.1, False, 1e-6)
    param.grad = torch.ones(5)
    assert larc.step(lambda: 7.0) == 7.0
    other = copy_(larc)
    assert (other.trust_coefficient, other.clip, other.eps) == (0.1, False, 1e-6)
    other.param_groups[0]["params"][0].grad = torch.ones(5)
    other.step()
    larc.load_state_dict(other.state_dict())
    assert larc.state[param]["step"] == 2
    larc.add_param_group({"params": [torch.ones(2, requires_grad=True)]})
    assert len(larc.optim.param_groups) == 2
    larc.zero_grad()
    assert param.grad is None
    assert repr(larc).startswith("LARC(AdamW")
    assert larc.param_groups is larc.optim.param_groups
    larc.optim = optim.SGD([param], lr=0.1)
    assert larc.defaults["lr"] == 0.1


def test_larc_refuses_what_it_cannot_wrap():
    param = torch.ones(3, requires_grad=True)
    with pytest.raises(TypeError, match="got list"):
        optim.LARC([param])
    for kind in (optim.LAMB, optim.NovoGrad):
        with pytest.raises(ValueError, match=f"{kind.__name__} already scales by the norm"):
            optim.LARC(kind([param]))


@pytest.mark.parametrize("kind", [optim.SGD, torch.optim.SGD])
def test_torchs_grad_scaler_drives_larc(kind):
    params = parameters([(20,)])
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    plain, scaled = (optim.LARC(kind(those, lr=0.1)) for those in (params, copy.deepcopy(params)))
    for step in range(3):
        train(plain, [step])
        give_gradients(params_of(scaled), step, scale=256.0)
        scaler.scale(torch.ones(()))
        scaler.step(scaled)
        scaler.update()
    assert_close(plain, scaled, rtol=1e-6, atol=1e-7)


def test_half_gradients_of_another_optimizer_follow_the_rule():
    param = torch.randn(300).to(bf16).requires_grad_()
    larc = optim.LARC(torch.optim.SGD([param], lr=0.1, weight_decay=0.1), 0.01)
    param.grad = torch.randn(300).to(bf16)
    exact = reference.layerwise(param, param.grad, 0.1, 0.1, 0.01)
    larc.step()
    torch.testing.assert_close(param.grad.to(f64), exact, rtol=0.005, atol=1e-6)
