"""Every rule once more, in float64 and in the plainest form: what the package is tested against.

Nothing here imports ampfuse, so that a mistake cannot be copied into its own check. Tensors are of
any dtype; a rule works on float64 copies and returns new ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def exact(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float64).clone()


class Sgd:
    """Sutskever et al., "On the importance of initialization and momentum", 2013, in torch's form.

    b_1 = g_1,  b_t = momentum * b_{t-1} + (1 - dampening) * g_t
    p_t = p_{t-1} - lr * b_t,  or with Nesterov's look-ahead  p_{t-1} - lr * (g_t + momentum * b_t)

    g is the gradient (its negative to maximize) plus weight_decay * p.
    """

    def __init__(
        self, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False
    ):
        self.lr, self.momentum, self.dampening = lr, momentum, dampening
        self.weight_decay, self.nesterov, self.maximize = weight_decay, nesterov, maximize

    def step(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        g = -exact(g) if self.maximize else exact(g)
        g = g + self.weight_decay * p
        if self.momentum == 0:
            return p - self.lr * g
        if "momentum_buffer" in state:
            buffer = self.momentum * state["momentum_buffer"] + (1 - self.dampening) * g
        else:
            buffer = g
        state["momentum_buffer"] = buffer
        return p - self.lr * (g + self.momentum * buffer if self.nesterov else buffer)


class Adam:
    """Kingma and Ba, arXiv:1412.6980, algorithm 1; AMSGrad of Reddi et al., arXiv:1904.09237.

    m_t = beta1 * m_{t-1} + (1 - beta1) * g_t,    m'_t = m_t / (1 - beta1^t)
    v_t = beta2 * v_{t-1} + (1 - beta2) * g_t^2,  v'_t = v_t / (1 - beta2^t)
    p_t = p_{t-1} - lr * m'_t / (sqrt(v'_t) + eps)

    AMSGrad puts the largest v_s, s <= t, in place of v_t (before the correction, as torch does).
    """

    def __init__(
        self, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False, maximize=False
    ):
        self.lr, self.betas, self.eps = lr, betas, eps
        self.weight_decay, self.amsgrad, self.maximize = weight_decay, amsgrad, maximize

    def decayed(self, p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """L2 regularisation: weight decay is part of the gradient."""
        return p, g + self.weight_decay * p

    def step(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        beta1, beta2 = self.betas
        p, g = self.decayed(p, -exact(g) if self.maximize else exact(g))
        t = state["step"] = state.get("step", 0) + 1
        zero = torch.zeros_like(p)
        m = state["exp_avg"] = beta1 * state.get("exp_avg", zero) + (1 - beta1) * g
        v = state["exp_avg_sq"] = beta2 * state.get("exp_avg_sq", zero) + (1 - beta2) * g**2
        if self.amsgrad:
            v = state["max_exp_avg_sq"] = torch.maximum(state.get("max_exp_avg_sq", zero), v)
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        return p - self.lr * m_hat / (v_hat.sqrt() + self.eps)


class AdamW(Adam):
    """Loshchilov and Hutter, arXiv:1711.05101, algorithm 2: the decay acts on the weight itself.

    The schedule multiplier eta_t is the learning rate, so p is multiplied by 1 - lr * weight_decay.
    """

    def __init__(
        self, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, maximize=False
    ):
        super().__init__(lr, betas, eps, weight_decay, amsgrad, maximize)

    def decayed(self, p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return p * (1 - self.lr * self.weight_decay), g


RULES = {"SGD": Sgd, "Adam": Adam, "AdamW": AdamW}


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
