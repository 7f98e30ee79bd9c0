"""Softmax cross-entropy from half logits: FP32 inside, no FP32 copy, the gradient in one pass."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import _reduction as _Reduction

from ampfuse.dtypes import FLOAT_DTYPES, HALF_DTYPES

__all__ = ["cross_entropy"]

_LEAST_COPIED = 128  # classes; the kernels take so many of a row at once

Reduction = Literal["mean", "sum", "none"]


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy(input.float(), target, ...)`` without the FP32 copy.

    The forward pass reads the logits once and keeps two numbers of each row; the backward pass
    reads them again and writes their gradient, in their own type: over them, where nobody else
    holds them any more. torch makes an FP32 copy of half logits and keeps ``log_softmax`` of it.
    Where a second derivative is asked for (``create_graph=True``), torch's operations give it.

    Fused are classes as targets, float32, float16 or bfloat16 logits on CPU and CUDA of shape (C,),
    (N, C) and (N, C, d1, ...) whose classes lie side by side in memory, as in a channels-last
    layout. Half logits of 128 classes or more in another layout are copied to this one. Everything
    else, probabilities as targets too, goes to torch's operations, in FP32.

    Arguments:
        input: logits.
        target: classes, int64, of the shape of `input` without C; or probabilities of its shape.
        weight: shape (C,), of the classes.
        size_average, reduce: what `reduction` was in old releases of torch.
        ignore_index: targets that do not count.
        reduction: "mean" (over the weights of the targets that count), "sum" or "none".
        label_smoothing: from 0 to 1.

    Returns:
        float32 (float64 of float64 logits): a scalar, or with "none" a loss for each target.

    Raises:
        ValueError: an unknown reduction, a smoothing out of its range.
        IndexError: on the CPU, a target that is not a class. On a GPU its loss is NaN.

    Source: ``F.cross_entropy``; Milakov & Gimelshein 2018 for the maximum found on the way.
    """
    if size_average is not None or reduce is not None:
        reduction = _Reduction.legacy_get_string(size_average, reduce)  # type: ignore[assignment]
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", not {reduction!r}.')
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, not {label_smoothing}.")
    rows = _rows(input, target, weight)
    if rows is None:
        if input.dtype in HALF_DTYPES:
            input = input.float()
            target = target.float() if target.is_floating_point() else target
        return F.cross_entropy(
            input,
            target,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    if weight is not None:
        weight = weight.float().contiguous()
    losses = torch.ops.ampfuse.cross_entropy(
        rows, target.reshape(-1).contiguous(), weight, ignore_index, label_smoothing
    )
    return reduce_losses(losses, target, weight, ignore_index, reduction)


def reduce_losses(
    losses: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: Reduction
) -> Tensor:
    """What `reduction` makes of the losses of all targets, which are zero where none counts."""
    if reduction == "none":
        return losses.view(target.shape)
    if reduction == "sum":
        return losses.sum()
    counts = target != ignore_index
    if weight is None:
        return losses.sum() / counts.sum()
    return losses.sum() / (weight[target.masked_fill(~counts, 0)] * counts).sum()


def _rows(input: Tensor, target: Tensor, weight: Tensor | None) -> Tensor | None:
    """The logits as a matrix, a row for each target; None if the kernels do not take them."""
    if (
        input.dtype not in FLOAT_DTYPES
        or input.device.type not in ("cpu", "cuda", "meta")
        or input.dim() == 0
        or target.dtype != torch.int64
        or target.device != input.device
        or (weight is not None and (weight.requires_grad or weight.device != input.device))
    ):
        return None
    classes = 0 if input.dim() == 1 else 1
    if target.shape != input.shape[:classes] + input.shape[classes + 1 :]:
        return None
    if weight is not None and weight.shape != input.shape[classes : classes + 1]:
        return None
    last = input.movedim(classes, -1)
    if not last.is_contiguous():
        is_half = input.dtype in HALF_DTYPES or hasattr(input, "half_data")
        if not is_half or last.shape[-1] < _LEAST_COPIED:
            return None
    return last.reshape(-1, last.shape[-1]).contiguous()
