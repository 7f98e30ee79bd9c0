"""What the tests of apex's optimizers share: trainings, calls of ``amp_C``, and apex's formulas."""

import dataclasses
import functools
import math

import torch
from torch import nn

import reference
from ampfuse.compat.apex import amp, amp_C
from cases import f32

# --- parameters, gradients and trainings ----------------------------------------------------------

SHAPES = ((3, 4), (5,), (1,))


def start(dtype=f32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def gradients(t, dtype=f32, scale=1.0):
    generator = torch.Generator().manual_seed(t)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in SHAPES]


def give_gradients(ps, t, scale=1.0):
    """To `ps`, or the first of them only."""
    for p, g in zip(ps, gradients(t, ps[0].dtype, scale), strict=False):
        p.grad = g


def take_steps(optimizer, ps, first=1, last=4):
    for t in range(first, last + 1):
        give_gradients(ps, t)
        optimizer.step()


def copies_of(ps):
    return [nn.Parameter(p.detach().clone()) for p in ps]


def assert_close(ps, others, rtol=1e-5, atol=1e-6):
    for p, q in zip(ps, others, strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol)


def assert_equal(ps, others):
    assert_close(ps, others, rtol=0, atol=0)


def started(make, level, **options):
    """A model and its optimizer, under amp at `level`, or without it and of that type."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    if not isinstance(level, str):
        return model.to(level), make(model.parameters(), **options)
    optimizer = make(model.parameters(), **options)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


def train(model, optimizer, steps, overflow=None):
    """The losses; that of the step `overflow` is infinite."""
    x, losses = torch.rand(16, 4, generator=torch.Generator().manual_seed(1)), []
    under_amp = hasattr(optimizer, "_amp_session")
    for step in range(steps):
        loss = (model(x if under_amp else x.to(model.weight)).float() - x[:, :2]).pow(2).mean()
        loss = loss * float("inf") if step == overflow else loss
        if under_amp:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# --- calls of amp_C on lists of tensors -----------------------------------------------------------

SIZES = (300, 5, 40000, 1)
LR, BETA1, BETA2, EPS, WD = 0.1, 0.9, 0.99, 1e-2, 0.1
T = 3  # the step


def rand(dtype=f32, device="cpu"):
    return [torch.rand(size).add(0.1).to(device, dtype) for size in SIZES]


def flag(value, device):
    return torch.full((1,), value, dtype=torch.int32, device=device)


def number(value, device, dtype=f32):
    return torch.tensor([value], dtype=dtype, device=device)


def call(name, noop, lists, options, chunk=65536):
    return getattr(amp_C, f"multi_tensor_{name}")(chunk, noop, lists, *options)


def arguments(name, device, lists=None):
    """The lists, float32, and the other arguments of a call."""
    one, step = number(1.0, device), number(T, device, torch.int32)
    moments = (BETA1, BETA2, EPS)
    norms = torch.ones(len(SIZES), device=device)
    depth, options = {
        "scale": (2, (1.0,)),
        "axpby": (3, (1.0, 1.0, -1)),
        "l2norm": (1, ()),
        "l2norm_mp": (1, ()),
        "unscale_l2norm": (1, (one,)),
        "l2norm_scale": (2, (1.0,)),
        "sgd": (3, (WD, 0.9, 0.0, LR, False, False, False, 1.0)),
        "adam": (4, (LR, *moments, T, 1, 1, WD)),
        "adam_capturable": (4, (one, *moments, step, 1, 1, WD, one / 2)),
        "adam_capturable_master": (5, (one, *moments, step, 1, 1, WD, one / 2)),
        "adagrad": (3, (LR, EPS, 1, WD)),
        "novograd": (3, (norms, LR, *moments, T, 1, WD, 1, 1, 2)),
        "lamb": (4, (LR, *moments, T, 1, WD, 1, 1, one, 1.0, False)),
        "lamb_mp": (5, (one, *moments, step, 1, WD, 1, 1, one, one, False, one * 0, one)),
        "lamb_stage1_cuda": (5, (norms, T, *moments, one, 1.0)),
        "lamb_stage2_cuda": (2, (norms, norms, LR, WD, False)),
    }[name]
    return lists or [rand(f32, device) for _ in range(depth)], options


OPERATIONS = [
    name.removeprefix("multi_tensor_") for name in amp_C.__all__ if name.startswith("multi_tensor_")
]

# --- formulas, in place on lists of tensors -------------------------------------------------------

# A formula takes parameters, gradients, a dict of states for each parameter, the step's number,
# and the options of apex's class with its defaults.
_DEFAULTS = {
    reference.Adam: {"lr": 1e-3, "weight_decay": 0.0},
    reference.AdamW: {"lr": 1e-3, "weight_decay": 0.0},
    reference.Adagrad: {"lr": 1e-2},
}
_RENAMED = dict.fromkeys(("adam_w_mode", "adagrad_w_mode"), "decoupled_weight_decay")


def rule_of(kind, options):
    """The rule with apex's `options`, as far as it has them."""
    options = {_RENAMED.get(name, name): value for name, value in options.items()}
    if options.get("norm_type") == 0:
        options["norm_type"] = math.inf
    known = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name, value in options.items() if name in known}
    return kind(**_DEFAULTS.get(kind, {}) | given)


def _steps(kind, ps, gs, states, t, **options):
    rule = rule_of(kind, options)
    for p, g, state in zip(ps, gs, states, strict=True):
        state["step"] = t - 1
        if t == 1 and options.get("momentum"):
            state.pop("momentum_buffer", None)
        p.copy_(rule.step(p, g, state))


sgd = functools.partial(_steps, reference.Sgd)
adagrad = functools.partial(_steps, reference.Adagrad)
novograd = functools.partial(_steps, reference.NovoGrad)


def adam(ps, gs, states, t, adam_w_mode=True, **options):
    _steps(reference.AdamW if adam_w_mode else reference.Adam, ps, gs, states, t, **options)


def lamb(ps, gs, states, t, max_grad_norm=1.0, **options):
    total = torch.stack([g.norm() for g in gs]).norm()
    gs = [g * (max_grad_norm / total) if total > max_grad_norm else g for g in gs]
    _steps(reference.Lamb, ps, gs, states, t, **options)


def adam_of_2019(p, m, v, g, lr, beta1, beta2, eps, scale, step, mode, bias_correction, decay):
    """The step of FusedAdam then, on one parameter and its moments; `mode` 0: eps in the root."""
    g = g.to(p.dtype) / scale
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    root = (v + eps).sqrt() if mode == 0 else v.sqrt() + eps
    if bias_correction:
        lr = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    return p - lr * (m / root + decay * p), m, v


def clipped_adam_of_2019(ps, gs, states, t, lr, eps, weight_decay, bias_correction, max_grad_norm):
    """On the parameters of one group, whose gradients are clipped together."""
    norm = torch.cat([g.reshape(-1) for g in gs]).norm()
    clip = min(1.0, max_grad_norm / (norm + 1e-6)) if max_grad_norm else 1.0
    given = (lr, 0.9, 0.999, eps, 1.0, t, 1, bias_correction, weight_decay)
    for p, g, state in zip(ps, gs, states, strict=True):
        held = (state.get(key, torch.zeros_like(p)) for key in ("m", "v"))
        new_p, state["m"], state["v"] = adam_of_2019(p, *held, g * clip, *given)
        p.copy_(new_p)
