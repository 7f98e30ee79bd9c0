"""Divide gradients by a loss scale where they are, exactly: what ``GradScaler.unscale_`` needs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ampfuse import _core
from ampfuse.optim.masters import HALF_DTYPES
from ampfuse.optim.shards import local, placed_as


@torch.no_grad()
def unscale(params: Iterable[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """Multiply the gradients of `params` (on one device) by `inv_scale`.

    FP32 gradients change in place. Half ones are replaced by FP32 ones, because rounding them back
    to half would flush small values to zero.

    Arguments:
        inv_scale: float32, one element, on that device.
        found_inf: float32, one element; becomes 1 if a gradient is not finite.
    """
    held = [(param, local(param.grad)) for param in params if param.grad is not None]
    old, new = [], []
    for _, gradient in held:
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(gradient)
        old.append(gradient if is_dense else gradient.clone())  # which has no gaps in memory
        is_half = gradient.dtype in HALF_DTYPES
        new.append(torch.empty_like(old[-1], dtype=torch.float32) if is_half else old[-1])
    if old:
        _core.C.unscale(old, new, inv_scale, found_inf)
    for (param, gradient), unscaled in zip(held, new, strict=True):
        if unscaled is gradient:
            continue
        if param.dtype in HALF_DTYPES:
            param.grad_dtype = None  # any type; the next backward gives a half gradient again
        param.grad = placed_as(param, unscaled)
