"""``fused_adam_cuda``: the step of apex's FusedAdam of 2018 and 2019, by torch's operations.

``adam(p, p_copy, m, v, grad, lr, beta1, beta2, eps, grad_scale, step, eps_mode, bias_correction,
decay)``: `p`, `m` and `v`, float32 or float64, change in place; `p_copy`, unless it is empty,
becomes `p` in its own type. `grad`, which may be half too, is divided by `grad_scale`; `step`
counts from 1. `eps_mode` 0 adds `eps` within the square root, 1 outside. `bias_correction` is a
factor of `lr`, and so of `decay`, which is decoupled.

``reversible_adam`` leaves elements whose gradient is not finite, and makes ``p_copy[0]`` inf then;
``maybe_adam_undo(flag, p, m, v, grad, lr, ...)`` takes it back, but for rounding, if the flag is
set. Names in ``_mt`` take ``(chunk_size, flag, [p, m, v, grad[, p_copy] lists], lr, ...)``.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def _adam(
    reversible: bool, p: Tensor, p_copy: Tensor, m: Tensor, v: Tensor, grad: Tensor, *numbers: Any
) -> None:
    g, beta1, beta2, rate, root, decay = _numbers(p, grad, *numbers)
    finite = g.isfinite() if reversible else torch.ones_like(g, dtype=torch.bool)
    new_m, new_v = torch.lerp(g, m, beta1), torch.lerp(g * g, v, beta2)
    new_p = p - rate * (new_m / root(new_v) + decay * p)
    for old, new in ((p, new_p), (m, new_m), (v, new_v)):
        old.copy_(torch.where(finite, new, old))
    if p_copy.numel():
        p_copy.copy_(p)
        p_copy.view(-1)[:1].masked_fill_(~finite.all(), float("inf"))


@torch.no_grad()
def maybe_adam_undo(
    flag: Tensor, p: Tensor, m: Tensor, v: Tensor, grad: Tensor, *numbers: Any
) -> None:
    g, beta1, beta2, rate, root, decay = _numbers(p, grad, *numbers)
    old_p = (p + rate * m / root(v)) / (1 - rate * decay)
    old_m, old_v = (m - (1 - beta1) * g) / beta1, (v - (1 - beta2) * g * g) / beta2
    back = g.isfinite() & (flag != 0).any()
    for new, old in ((p, old_p), (m, old_m), (v, old_v.clamp(min=0))):
        new.copy_(torch.where(back, old, new))


@torch.no_grad()
def strided_check_finite(flag: Tensor, p_copy: Tensor, stride: int, clear: int) -> None:
    """Set the flag if one of every `stride` elements is not finite; `clear` it before."""
    if clear:
        flag.zero_()
    flag.masked_fill_(~p_copy.view(-1)[::stride].isfinite().all(), 1)


def _numbers(p: Tensor, grad: Tensor, *numbers: Any) -> Any:
    lr, beta1, beta2, eps, grad_scale, step, eps_mode, bias_correction, decay = numbers
    rate = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step) if bias_correction else lr
    root = (lambda v: v.sqrt() + eps) if eps_mode else (lambda v: (v + eps).sqrt())
    return grad.to(p.dtype) / grad_scale, beta1, beta2, rate, root, decay


def _for_each(adam: Any, chunk_size: int, flag: Tensor, lists: Any, *numbers: Any) -> None:
    for p, m, v, grad, *copy in zip(*lists, strict=True):
        adam(p, *(copy or [p.new_empty(0)]), m, v, grad, *numbers)


def maybe_adam_undo_mt(chunk_size: int, flag: Tensor, lists: Any, *numbers: Any) -> None:
    for p, m, v, grad, *_ in zip(*lists, strict=True):
        maybe_adam_undo(flag, p, m, v, grad, *numbers)


adam, reversible_adam = functools.partial(_adam, False), functools.partial(_adam, True)
adam_mt = functools.partial(_for_each, adam)
reversible_adam_mt = functools.partial(_for_each, reversible_adam)
