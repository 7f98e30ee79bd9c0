"""apex's optimizers, written plainly: the slow reference, in place on lists of tensors.

Each takes parameters, gradients, a dict of states for each parameter, the number of the step, and
the options of apex's class with its defaults.
"""

import torch

ADAM = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8}
DEFAULTS = {
    "sgd": {"lr": None, "momentum": 0, "dampening": 0, "weight_decay": 0}
    | {"nesterov": False, "wd_after_momentum": False},
    "adam": ADAM | {"adam_w_mode": True, "weight_decay": 0.0},
    "adagrad": {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0, "adagrad_w_mode": False},
    "novograd": ADAM
    | {"weight_decay": 0.0, "reg_inside_moment": False, "grad_averaging": True}
    | {"norm_type": 2, "init_zero": False},
    "lamb": ADAM
    | {"eps": 1e-6, "weight_decay": 0.01, "adam_w_mode": True, "grad_averaging": True}
    | {"max_grad_norm": 1.0, "use_nvlamb": False},
}


def _corrections(o, t):
    return [1 - beta**t if o["bias_correction"] else 1.0 for beta in o["betas"]]


def _decayed(g, p, o, through_gradient):
    return g + o["weight_decay"] * p if through_gradient else g


def sgd(ps, gs, states, t, **options):
    o = DEFAULTS["sgd"] | options
    for p, g, s in zip(ps, gs, states, strict=True):
        g = _decayed(g, p, o, not o["wd_after_momentum"])
        if o["momentum"]:
            s["m"] = g if t == 1 else o["momentum"] * s["m"] + (1 - o["dampening"]) * g
            g = g + o["momentum"] * s["m"] if o["nesterov"] else s["m"]
        p -= o["lr"] * _decayed(g, p, o, o["wd_after_momentum"])


def adam_update(p, g, s, t, o):
    """Adam's step without the rate, which is LAMB's without the ratio."""
    (b1, b2), (c1, c2) = o["betas"], _corrections(o, t)
    g = _decayed(g, p, o, not o["adam_w_mode"])
    s["m"] = b1 * s.get("m", 0) + (1 - b1 if o.get("grad_averaging", True) else 1.0) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
    return _decayed((s["m"] / c1) / ((s["v"] / c2).sqrt() + o["eps"]), p, o, o["adam_w_mode"])


def adam(ps, gs, states, t, **options):
    o = DEFAULTS["adam"] | options
    for p, g, s in zip(ps, gs, states, strict=True):
        p -= o["lr"] * adam_update(p, g, s, t, o)


def adagrad(ps, gs, states, t, **options):
    o = DEFAULTS["adagrad"] | options
    for p, g, s in zip(ps, gs, states, strict=True):
        g = _decayed(g, p, o, not o["adagrad_w_mode"])
        s["h"] = s.get("h", 0) + g * g
        p -= o["lr"] * _decayed(g / (s["h"].sqrt() + o["eps"]), p, o, o["adagrad_w_mode"])


def novograd(ps, gs, states, t, **options):
    o = DEFAULTS["novograd"] | options
    (b1, b2), (c1, c2) = o["betas"], _corrections(o, t)
    beta3, inside = 1 - b1 if o["grad_averaging"] else 1.0, o["reg_inside_moment"]
    for p, g, s in zip(ps, gs, states, strict=True):
        norm = g.norm() if o["norm_type"] == 2 else g.abs().max()
        v = s.get("v", 0.0 if o["init_zero"] else norm)
        if o["norm_type"] == 2:
            s["v"] = (b2 * v**2 + (1 - b2) * norm**2) ** 0.5
        else:
            s["v"] = b2 * v + (1 - b2) * norm
        # apex corrects an average that started at a norm too, which shrinks the first steps.
        d = s["v"] / (c2**0.5 if o["init_zero"] else 1.0) + o["eps"]
        g = _decayed(g / d, p, o, True) if inside else g
        s["m"] = b1 * s.get("m", 0) + beta3 * g
        p -= o["lr"] * (s["m"] / c1 if inside else _decayed(s["m"] / c1 / d, p, o, True))


def lamb(ps, gs, states, t, **options):
    o = DEFAULTS["lamb"] | options
    total, largest = torch.stack([g.norm() for g in gs]).norm(), o["max_grad_norm"]
    for p, g, s in zip(ps, gs, states, strict=True):
        g = g * (largest / total) if total > largest else g
        p -= o["lr"] * lamb_ratio(p, u := adam_update(p, g, s, t, o), o) * u


def lamb_ratio(p, u, o):
    has_ratio = (o["use_nvlamb"] or o["weight_decay"]) and p.any() and u.any()
    return p.norm() / u.norm() if has_ratio else 1.0
