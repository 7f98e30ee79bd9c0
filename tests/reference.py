"""Every rule once more, in float64 and in the plainest form: what the package is tested against.

Nothing here imports ampfuse, so that a mistake cannot be copied into its own check. Tensors are of
any dtype; a rule works on float64 copies and returns new ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


def exact(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float64).clone()


@dataclass
class Sgd:
    """Sutskever et al., "On the importance of initialization and momentum", 2013, in torch's form.

    b_1 = g_1,  b_t = momentum * b_{t-1} + (1 - dampening) * g_t
    p_t = p_{t-1} - lr * b_t,  or with Nesterov's look-ahead  p_{t-1} - lr * (g_t + momentum * b_t)

    g is the gradient (its negative to maximize) plus weight_decay * p, which apex's option
    `wd_after_momentum` adds to the step instead.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False
    wd_after_momentum: bool = False

    def step(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        g = -exact(g) if self.maximize else exact(g)
        decay = self.weight_decay * p
        late = decay if self.wd_after_momentum else 0
        g = g if self.wd_after_momentum else g + decay
        if self.momentum == 0:
            return p - self.lr * (g + late)
        if "momentum_buffer" in state:
            buffer = self.momentum * state["momentum_buffer"] + (1 - self.dampening) * g
        else:
            buffer = g
        state["momentum_buffer"] = buffer
        return p - self.lr * ((g + self.momentum * buffer if self.nesterov else buffer) + late)


def adam_direction(rule: Any, g: Tensor, state: dict[str, Any], averaged: bool = True) -> Tensor:
    """m'_t / (sqrt(v'_t) + eps). Unless `averaged`, g enters m whole."""
    beta1, beta2 = rule.betas
    t = state["step"] = state.get("step", 0) + 1
    zero = torch.zeros_like(g)
    weight = 1 - beta1 if averaged else 1.0
    m = state["exp_avg"] = beta1 * state.get("exp_avg", zero) + weight * g
    v = state["exp_avg_sq"] = beta2 * state.get("exp_avg_sq", zero) + (1 - beta2) * g**2
    if getattr(rule, "amsgrad", False):
        v = state["max_exp_avg_sq"] = torch.maximum(state.get("max_exp_avg_sq", zero), v)
    if rule.bias_correction:
        m, v = m / (1 - beta1**t), v / (1 - beta2**t)
    return m / (v.sqrt() + rule.eps)


@dataclass
class Adam:
    """Kingma and Ba, arXiv:1412.6980, algorithm 1; AMSGrad of Reddi et al., arXiv:1904.09237.

    m_t = beta1 * m_{t-1} + (1 - beta1) * g_t,    m'_t = m_t / (1 - beta1^t)
    v_t = beta2 * v_{t-1} + (1 - beta2) * g_t^2,  v'_t = v_t / (1 - beta2^t)
    p_t = p_{t-1} - lr * m'_t / (sqrt(v'_t) + eps)

    AMSGrad puts the largest v_s, s <= t, in place of v_t (before the correction, as torch does).
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    bias_correction: bool = True

    def decayed(self, p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """L2 regularisation: weight decay is part of the gradient."""
        return p, g + self.weight_decay * p

    def step(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        p, g = self.decayed(p, -exact(g) if self.maximize else exact(g))
        return p - self.lr * adam_direction(self, g, state)


@dataclass
class AdamW(Adam):
    """Loshchilov and Hutter, arXiv:1711.05101, algorithm 2: the decay acts on the weight itself.

    The schedule multiplier eta_t is the learning rate, so p is multiplied by 1 - lr * weight_decay.
    """

    weight_decay: float = 1e-2

    def decayed(self, p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return p * (1 - self.lr * self.weight_decay), g


@dataclass
class Adagrad:
    """Duchi, Hazan and Singer, JMLR 12, 2011, in torch's form.

    h_t = h_{t-1} + g_t^2,  p_t = p_{t-1} - lr / (1 + (t - 1) * lr_decay) * g_t / (sqrt(h_t) + eps)
    """

    lr: float
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = False
    decoupled_weight_decay: bool = False

    def step(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        g = -exact(g) if self.maximize else exact(g)
        t = state["step"] = state.get("step", 0) + 1
        lr = self.lr / (1 + (t - 1) * self.lr_decay)
        g = g if self.decoupled_weight_decay else g + self.weight_decay * p
        start = torch.full_like(p, self.initial_accumulator_value)
        h = state["sum"] = state.get("sum", start) + g**2
        decay = lr * self.weight_decay * p if self.decoupled_weight_decay else 0
        return p - lr * g / (h.sqrt() + self.eps) - decay


@dataclass
class Lamb:
    """You et al., arXiv:1904.00962, algorithm 2, with the identity for phi.

    r_t = m'_t / (sqrt(v'_t) + eps),  u_t = r_t + weight_decay * p_{t-1}
    p_t = p_{t-1} - lr * |p_{t-1}| / |u_t| * u_t

    The ratio is 1 where a norm is 0 and, unless `use_nvlamb`, where there is no weight decay. Works
    in the type of p, so that it is also the FP32 implementation that ours is compared with.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    bias_correction: bool = True
    grad_averaging: bool = True
    decoupled_weight_decay: bool = True
    use_nvlamb: bool = False

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        """u_t."""
        g, decay = g.to(p.dtype), self.weight_decay * p
        if not self.decoupled_weight_decay:
            return adam_direction(self, g + decay, state, self.grad_averaging)
        return adam_direction(self, g, state, self.grad_averaging) + decay

    def step(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        u, ratio = self.update(p, g, state), 1.0
        if self.weight_decay != 0 or self.use_nvlamb:
            norms = (p**2).sum().sqrt(), (u**2).sum().sqrt()
            ratio = norms[0] / norms[1] if norms[0] > 0 and norms[1] > 0 else 1.0
        return p - self.lr * ratio * u


@dataclass
class NovoGrad:
    """Ginsburg et al., arXiv:1905.11286, algorithm 1, with the options of NVIDIA's code.

    v_t = beta2 * v_{t-1} + (1 - beta2) * |g_t|^2,  v_1 = |g_1|^2
    m_t = beta1 * m_{t-1} + (1 - beta1) * (g_t / (sqrt(v_t) + eps) + weight_decay * p_{t-1})
    p_t = p_{t-1} - lr * m_t / (1 - beta1^t)

    is `reg_inside_moment`; otherwise division and decay act on the averaged gradient. The state is
    sqrt(v). Works in the type of p, as Lamb does.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    bias_correction: bool = True
    grad_averaging: bool = True
    norm_type: float = 2
    init_zero: bool = False
    reg_inside_moment: bool = False

    def step(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        beta1, beta2 = self.betas
        g = g.to(p.dtype)
        t = state["step"] = state.get("step", 0) + 1
        power = 1 if self.norm_type == math.inf else 2
        norm = g.norm(self.norm_type) if g.numel() else g.sum()
        start = torch.zeros_like(norm) if self.init_zero else norm
        old = start if t == 1 else state["exp_avg_norm"]
        v = (beta2 * old**power + (1 - beta2) * norm**power) ** (1 / power)
        state["exp_avg_norm"] = v
        weight = 1 - beta1 if self.grad_averaging else 1.0
        d = v + self.eps
        if self.bias_correction and self.init_zero:
            d = v / (1 - beta2**t) ** 0.5 + self.eps
        if self.reg_inside_moment:
            g = g / d + self.weight_decay * p
        m = state["exp_avg"] = beta1 * state.get("exp_avg", torch.zeros_like(p)) + weight * g
        if self.bias_correction:
            m = m / (1 - beta1**t)
        return p - self.lr * (m if self.reg_inside_moment else m / d + self.weight_decay * p)


@dataclass
class Lion:
    """Chen et al., arXiv:2302.06675, algorithm 2.

    p_t = p_{t-1} - lr * (sign(beta1 * m_{t-1} + (1 - beta1) * g_t) + weight_decay * p_{t-1})
    m_t = beta2 * m_{t-1} + (1 - beta2) * g_t
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    maximize: bool = False

    def step(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        beta1, beta2 = self.betas
        g = (-g if self.maximize else g).to(p.dtype)
        state["step"] = state.get("step", 0) + 1
        m = state.get("exp_avg", torch.zeros_like(p))
        state["exp_avg"] = beta2 * m + (1 - beta2) * g
        return p - self.lr * ((beta1 * m + (1 - beta1) * g).sign() + self.weight_decay * p)


RULES = {
    "SGD": Sgd,
    "Adam": Adam,
    "AdamW": AdamW,
    "Adagrad": Adagrad,
    "LAMB": Lamb,
    "NovoGrad": NovoGrad,
    "Lion": Lion,
}


def layerwise(
    p: Tensor, g: Tensor, lr: float, weight_decay: float, trust=0.02, eps=1e-8, clip=True
) -> Tensor:
    """You et al., arXiv:1708.03888: the gradient, decayed and scaled by the ratio of the norms.

    `clip` keeps lr times ratio at most lr. Where a norm is zero the gradient stays, undecayed.
    """
    norms = norm([p]), norm([g])
    if norms[0] == 0 or norms[1] == 0:
        return exact(g)
    ratio = trust * norms[0] / (norms[1] + weight_decay * norms[0] + eps)
    ratio = min(ratio / lr, 1.0) if clip else ratio
    return (exact(g) + weight_decay * exact(p)) * ratio


def norm(tensors: Iterable[Tensor]) -> float:
    """The L2 norm over all elements of all tensors. float64 holds the square of any float32."""
    return math.sqrt(sum(float((exact(tensor) ** 2).sum()) for tensor in tensors))


def clip_coefficient(total_norm: float, max_norm: float) -> float:
    """Pascanu et al., arXiv:1211.5063, algorithm 1, with the 1e-6 of clip_grad_norm_."""
    return min(1.0, max_norm / (total_norm + 1e-6))


class LossScale:
    """Micikevicius et al., arXiv:1710.03740, section 3.2, with limits and hysteresis.

    An overflow multiplies the scale by `backoff`, once `hysteresis` of them have come since it last
    grew; `interval` clean steps in a row multiply it by `growth`.
    """

    def __init__(
        self, scale, growth=2.0, backoff=0.5, interval=2000, low=0.0, high=3e38, hysteresis=1
    ):
        self.scale, self.growth, self.backoff, self.interval = scale, growth, backoff, interval
        self.low, self.high, self.hysteresis = low, high, hysteresis
        self.clean, self.tolerated = 0, hysteresis

    def update(self, overflow: bool) -> None:
        if overflow:
            self.clean = 0
            self.tolerated -= 1
            if self.tolerated <= 0:
                self.scale = max(self.scale * self.backoff, self.low)
        else:
            self.clean += 1
            if self.clean == self.interval:
                self.clean, self.tolerated = 0, self.hysteresis
                self.scale = min(self.scale * self.growth, self.high)


# --- apex's optimizers, in place on lists of tensors ----------------------------------------------

# A formula takes parameters, gradients, a dict of states for each parameter, the step's number,
# and the options of apex's class with its defaults.
_APEX_DEFAULTS = {
    Adam: {"lr": 1e-3, "weight_decay": 0.0},
    AdamW: {"lr": 1e-3, "weight_decay": 0.0},
    Adagrad: {"lr": 1e-2},
}
_APEX_NAMES = dict.fromkeys(("adam_w_mode", "adagrad_w_mode"), "decoupled_weight_decay")


def apex_rule(kind, options):
    """The rule with apex's `options`, as far as it has them."""
    options = {_APEX_NAMES.get(name, name): value for name, value in options.items()}
    if options.get("norm_type") == 0:
        options["norm_type"] = math.inf
    known = {field.name for field in fields(kind)}
    given = {name: value for name, value in options.items() if name in known}
    return kind(**_APEX_DEFAULTS.get(kind, {}) | given)


def _apex_steps(kind, ps, gs, states, t, **options):
    rule = apex_rule(kind, options)
    for p, g, state in zip(ps, gs, states, strict=True):
        state["step"] = t - 1
        if t == 1 and options.get("momentum"):
            state.pop("momentum_buffer", None)
        p.copy_(rule.step(p, g, state))


apex_sgd = functools.partial(_apex_steps, Sgd)
apex_adagrad = functools.partial(_apex_steps, Adagrad)
apex_novograd = functools.partial(_apex_steps, NovoGrad)


def apex_adam(ps, gs, states, t, adam_w_mode=True, **options):
    _apex_steps(AdamW if adam_w_mode else Adam, ps, gs, states, t, **options)


def apex_lamb(ps, gs, states, t, max_grad_norm=1.0, **options):
    total = torch.stack([g.norm() for g in gs]).norm()
    gs = [g * (max_grad_norm / total) if total > max_grad_norm else g for g in gs]
    _apex_steps(Lamb, ps, gs, states, t, **options)


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
