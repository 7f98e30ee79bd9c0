"""``apex.optimizers``: every flag against apex's formulas, written plainly in float64."""

import copy
import importlib
import inspect
import itertools
import math

import pytest
import torch
from torch import nn

from ampfuse.compat import apex
from ampfuse.compat.apex import amp, optimizers

f16, f32, f64 = torch.float16, torch.float32, torch.float64
SHAPES = ((3, 4), (5,), (1,))


def corrections(group, t):
    beta1, beta2 = group["betas"]
    return (1 - beta1**t, 1 - beta2**t) if group["bias_correction"] else (1.0, 1.0)


def sgd(
    ps,
    gs,
    states,
    t,
    *,
    lr,
    momentum=0,
    dampening=0,
    weight_decay=0,
    nesterov=False,
    wd_after_momentum=False,
):
    for p, g, s in zip(ps, gs, states, strict=True):
        if not wd_after_momentum:
            g = g + weight_decay * p
        if momentum:
            s["m"] = g if t == 1 else momentum * s["m"] + (1 - dampening) * g
            g = g + momentum * s["m"] if nesterov else s["m"]
        if wd_after_momentum:
            g = g + weight_decay * p
        p -= lr * g


def adam(
    ps,
    gs,
    states,
    t,
    *,
    lr=1e-3,
    bias_correction=True,
    betas=(0.9, 0.999),
    eps=1e-8,
    adam_w_mode=True,
    weight_decay=0.0,
):
    c1, c2 = corrections({"betas": betas, "bias_correction": bias_correction}, t)
    for p, g, s in zip(ps, gs, states, strict=True):
        if not adam_w_mode:
            g = g + weight_decay * p
        s["m"] = betas[0] * s.get("m", 0) + (1 - betas[0]) * g
        s["v"] = betas[1] * s.get("v", 0) + (1 - betas[1]) * g * g
        u = (s["m"] / c1) / ((s["v"] / c2).sqrt() + eps)
        if adam_w_mode:
            u = u + weight_decay * p
        p -= lr * u


def adagrad(ps, gs, states, t, *, lr=1e-2, eps=1e-10, weight_decay=0.0, adagrad_w_mode=False):
    for p, g, s in zip(ps, gs, states, strict=True):
        if not adagrad_w_mode:
            g = g + weight_decay * p
        s["h"] = s.get("h", 0) + g * g
        u = g / (s["h"].sqrt() + eps)
        p -= lr * (u + weight_decay * p if adagrad_w_mode else u)


def novograd(
    ps,
    gs,
    states,
    t,
    *,
    lr=1e-3,
    bias_correction=True,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    reg_inside_moment=False,
    grad_averaging=True,
    norm_type=2,
    init_zero=False,
):
    c1, c2 = corrections({"betas": betas, "bias_correction": bias_correction}, t)
    beta3 = 1 - betas[0] if grad_averaging else 1.0
    for p, g, s in zip(ps, gs, states, strict=True):
        norm = g.norm() if norm_type == 2 else g.abs().max()
        v = s.get("v", 0.0 if init_zero else norm)
        if norm_type == 2:
            s["v"] = (betas[1] * v**2 + (1 - betas[1]) * norm**2) ** 0.5
        else:
            s["v"] = betas[1] * v + (1 - betas[1]) * norm
        # apex corrects an average that started at a norm too, which shrinks the first steps.
        d = s["v"] / (c2**0.5 if init_zero else 1.0) + eps
        if reg_inside_moment:
            g = g / d + weight_decay * p
        s["m"] = betas[0] * s.get("m", 0) + beta3 * g
        p -= lr * (s["m"] / c1 if reg_inside_moment else s["m"] / c1 / d + weight_decay * p)


def lamb(
    ps,
    gs,
    states,
    t,
    *,
    lr=1e-3,
    bias_correction=True,
    betas=(0.9, 0.999),
    eps=1e-6,
    weight_decay=0.01,
    adam_w_mode=True,
    grad_averaging=True,
    max_grad_norm=1.0,
    use_nvlamb=False,
):
    c1, c2 = corrections({"betas": betas, "bias_correction": bias_correction}, t)
    beta3 = 1 - betas[0] if grad_averaging else 1.0
    total = torch.stack([g.norm() for g in gs]).norm()
    clips = 0 < max_grad_norm < total
    for p, g, s in zip(ps, gs, states, strict=True):
        g = g / (total / max_grad_norm) if clips else g
        if not adam_w_mode:
            g = g + weight_decay * p
        s["m"] = betas[0] * s.get("m", 0) + beta3 * g
        s["v"] = betas[1] * s.get("v", 0) + (1 - betas[1]) * g * g
        u = (s["m"] / c1) / ((s["v"] / c2).sqrt() + eps)
        if adam_w_mode:
            u = u + weight_decay * p
        ratio = p.norm() / u.norm() if (use_nvlamb or weight_decay) and p.any() and u.any() else 1.0
        p -= lr * ratio * u


LAMB_FLAGS = {
    "bias_correction": (True, False),
    "weight_decay": (0.0, 0.1),
    "adam_w_mode": (True, False),
    "grad_averaging": (True, False),
    "max_grad_norm": (1.0, 0, math.inf),
    "use_nvlamb": (False, True),
}
OPTIMIZERS = {
    "FusedSGD": (
        sgd,
        {"lr": (0.05,), "momentum": (0, 0.9), "weight_decay": (0, 0.1)}
        | {"wd_after_momentum": (False, True)},
    ),
    "FusedAdam": (
        adam,
        {"bias_correction": (True, False), "adam_w_mode": (True, False)}
        | {"weight_decay": (0.0, 0.1)},
    ),
    "FusedAdagrad": (adagrad, {"weight_decay": (0.0, 0.1), "adagrad_w_mode": (False, True)}),
    "FusedNovoGrad": (
        novograd,
        {
            "bias_correction": (True, False),
            "weight_decay": (0.0, 0.1),
            "reg_inside_moment": (False, True),
            "grad_averaging": (True, False),
            "norm_type": (2, 0),
            "init_zero": (False, True),
        },
    ),
    "FusedLAMB": (lamb, LAMB_FLAGS),
    "FusedMixedPrecisionLamb": (lamb, LAMB_FLAGS),
}
CASES = [
    (name, dict(zip(flags, values, strict=True)))
    for name, (_, flags) in OPTIMIZERS.items()
    for values in itertools.product(*flags.values())
]


def start(dtype=f32):
    generator = torch.Generator().manual_seed(0)
    ps = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return [nn.Parameter(p) for p in ps]


def gradients(t, dtype=f32):
    generator = torch.Generator().manual_seed(t)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def take_steps(optimizer, ps, first=1, last=4):
    for t in range(first, last + 1):
        for p, g in zip(ps, gradients(t, ps[0].dtype), strict=True):
            p.grad = g
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "options"),
    CASES,
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values())),
)
def test_formulas(name, options):
    ps = start()
    take_steps(getattr(optimizers, name)(ps, **options), ps)
    exact, states = [p.detach().to(f64) for p in start()], [{} for _ in SHAPES]
    for t in range(1, 5):
        OPTIMIZERS[name][0](exact, [g.to(f64) for g in gradients(t)], states, t, **options)
    for p, e in zip(ps, exact, strict=True):
        torch.testing.assert_close(p.to(f64), e, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_reference_has_the_signatures_defaults(name):
    ours = inspect.signature(getattr(optimizers, name)).parameters
    reference = inspect.signature(OPTIMIZERS[name][0]).parameters
    for key, parameter in reference.items():
        if parameter.kind is parameter.KEYWORD_ONLY and key != "lr":
            assert ours[key].default == parameter.default, key


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n != "FusedSGD"])
def test_what_they_refuse(name):
    if name != "FusedAdagrad":
        with pytest.raises(RuntimeError, match="AMSGrad"):
            getattr(optimizers, name)(start(), amsgrad=True)
    if name == "FusedNovoGrad":
        with pytest.raises(RuntimeError, match="norm_type"):
            optimizers.FusedNovoGrad(start(), norm_type=1)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_under_amp_at_every_level(name, level):
    """NovoGrad raised KeyError in apex's initialize."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    options = {"lr": 0.02} if name != "FusedSGD" else {"lr": 0.1, "momentum": 0.9}
    optimizer = getattr(optimizers, name)(model.parameters(), **options)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    x, losses = torch.rand(16, 4), []
    for _ in range(12):
        loss = (model(x).float() - x[:, :2]).pow(2).mean()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_come_and_go_and_groups_are_added(name):
    """AssertionError in apex's NovoGrad; groups that were never updated in two others."""
    ps = start()
    options = {"lr": 0.01}
    optimizer = getattr(optimizers, name)(ps[:1], **options)
    for present in ((0,), (0, 1), (1,)):
        if len(optimizer.param_groups) == 1 and 1 in present:
            optimizer.add_param_group({"params": ps[1:]})
        before = [p.detach().clone() for p in ps]
        for i, (p, g) in enumerate(zip(ps, gradients(1), strict=True)):
            p.grad = g if i in present else None
        optimizer.step()
        changed = [not torch.equal(p, b) for p, b in zip(ps, before, strict=True)]
        assert changed == [i in present for i in range(3)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resuming_gives_the_same_bits(name):
    options = {"lr": 0.01} | ({"momentum": 0.9} if name == "FusedSGD" else {})
    ps = start()
    optimizer = getattr(optimizers, name)(ps, **options)
    take_steps(optimizer, ps)
    saved = copy.deepcopy(optimizer.state_dict())
    again = [nn.Parameter(p.detach().clone()) for p in ps]
    take_steps(optimizer, ps, first=5, last=6)
    resumed = getattr(optimizers, name)(again, **options)
    resumed.load_state_dict(saved)
    take_steps(resumed, again, first=5, last=6)
    assert all(torch.equal(a, b) for a, b in zip(ps, again, strict=True))


def test_novograd_reads_apexs_norms():
    ps = start()
    optimizer = optimizers.FusedNovoGrad(ps, lr=0.01)
    take_steps(optimizer, ps)
    state = copy.deepcopy(optimizer.state_dict())
    norms = [entry.pop("exp_avg_norm").reshape(()) for entry in state["state"].values()]
    for entry in state["state"].values():
        entry.pop("step")
    state["param_groups"][0].update(step=4, exp_avg_sq=[torch.empty(0), torch.stack(norms)])
    again = [nn.Parameter(p.detach().clone()) for p in ps]
    resumed = optimizers.FusedNovoGrad(again, lr=0.01)
    resumed.load_state_dict(state)
    take_steps(optimizer, ps, first=5, last=6)
    take_steps(resumed, again, first=5, last=6)
    assert all(torch.equal(a, b) for a, b in zip(ps, again, strict=True))
    state["param_groups"][0]["exp_avg_sq"] = [torch.stack(norms), torch.empty(0)]
    with pytest.raises(ValueError, match="norms of 3"):
        resumed.load_state_dict(state)


def test_mixed_precision_lamb():
    ps = start(f16)
    optimizer = optimizers.FusedMixedPrecisionLamb(ps, lr=0.01, step=3)
    optimizer.reduced_precision_dtype = f16
    take_steps(optimizer, ps, last=1)
    for p in ps:
        assert optimizer.state[p]["step"].item() == 4
        assert torch.equal(optimizer.state[p]["master_param"].half(), p)
    before = [p.detach().clone() for p in ps]
    for p in ps:
        p.grad = torch.full_like(p, float("inf"))
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(ps, before, strict=True))
    assert optimizer.state[ps[0]]["step"].item() == 4

    def closure():
        assert torch.is_grad_enabled()  # it was off in apex
        optimizer.zero_grad()
        loss = sum(p.float().pow(2).sum() for p in ps)
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0


def test_larc_is_a_module_with_a_class():
    larc = importlib.import_module("ampfuse.compat.apex.parallel.LARC")
    assert apex.parallel.LARC is larc
    ps = start()
    optimizer = larc.LARC(torch.optim.SGD(ps, lr=0.1, momentum=0.9), trust_coefficient=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    take_steps(optimizer, ps, last=1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
