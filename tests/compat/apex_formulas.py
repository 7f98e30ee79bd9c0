"""apex's optimizers by the rules of reference.py, in place on lists of tensors.

Each takes parameters, gradients, a dict of states for each parameter, the number of the step, and
the options of apex's class with its defaults.
"""

import dataclasses
import functools
import math

import torch

import reference

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
