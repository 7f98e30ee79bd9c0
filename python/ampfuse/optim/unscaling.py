"""Divide gradients by a loss scale where they are, exactly: what ``GradScaler.unscale_`` needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from ampfuse import _core
from ampfuse.optim.masters import FLOAT_DTYPES, HALF_DTYPES
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
    old: list[Tensor] = []
    new: list[Tensor] = []
    replaced: list[tuple[Tensor, Tensor]] = []
    other: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for param in params:
        if param.grad is None:
            continue
        gradient = local(param.grad)
        if gradient.is_sparse:
            # Duplicate indices add up, and in half the sum may overflow: look at the sums.
            if gradient.dtype in HALF_DTYPES:
                gradient = param.grad = gradient.coalesce()
            gradient = gradient._values()
            other[gradient.dtype].append(gradient)
        elif not _is_dense(gradient) or gradient.dtype not in FLOAT_DTYPES:
            other[gradient.dtype].append(gradient)
        else:
            out = gradient
            if gradient.dtype in HALF_DTYPES:
                out = torch.empty_like(gradient, dtype=torch.float32)
                replaced.append((param, out))
            old.append(gradient)
            new.append(out)
    if old:
        _core.C.unscale(old, new, inv_scale, found_inf)
    # What the fused op does not take (sparse, float64, views with gaps) goes torch's way.
    for gradients in other.values():
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
    for param, gradient in replaced:
        if param.dtype in HALF_DTYPES:
            param.grad_dtype = None  # any type; the next backward gives a half gradient again
        param.grad = placed_as(param, gradient)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)
