"""``apex.fp16_utils.loss_scaler``: loss scaling on the host, for loops written by hand.

These are other classes than ``apex.amp.scaler.LossScaler``, with other defaults.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class LossScaler:
    """A static scale, which never sees an overflow."""

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        return False

    def update_scale(self, overflow: bool) -> None:
        """The scale stays."""

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def scale_gradient(self, module: Any, grad_in: Any, grad_out: Any) -> tuple[Any, ...]:
        """`grad_in` times the scale, as a backward hook returns it."""
        return tuple(None if g is None else self.loss_scale * g for g in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Backward of ``loss * loss_scale``."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A scale that an overflow divides and `scale_window` clean iterations multiply.

    Arguments:
        init_scale: the scale to start from.
        scale_factor: what it is divided and multiplied by. It does not go below 1.
        scale_window: it grows when this many iterations since the last overflow are over.
    """

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        self.cur_scale = init_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether a gradient of `params` holds inf or NaN. Waits for the device, once."""
        checks = [~p.grad.isfinite().all() for p in params if p.grad is not None]
        if not checks:
            return False
        device = checks[0].device
        return bool(torch.stack([check.to(device) for check in checks]).any())

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return not bool(x.isfinite().all())

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
