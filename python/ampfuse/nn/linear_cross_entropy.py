"""The last linear layer of a classifier with its loss, in blocks of rows: never all logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ampfuse.nn.cross_entropy import Reduction, cross_entropy, reduce_losses

_BLOCK_LOGITS = 1 << 24  # of a block, unless it is said how many rows


class LinearCrossEntropy(nn.Linear):
    """``F.cross_entropy(linear(x), target)`` without the logits of all rows in memory.

    For many classes: of a language model's head with 128k words the logits and their gradient are
    most of what a step holds. Here a block of rows has its logits made, their losses taken, and
    both forgotten; the backward pass makes them again, writes their gradient over them, and
    multiplies on. That is a third more products in this layer.

    Parameters and state dict are those of ``nn.Linear``.

    Arguments:
        in_features, out_features, bias, device, dtype: as in ``nn.Linear``; classes are features.
        ignore_index, reduction, label_smoothing: as in :func:`ampfuse.nn.cross_entropy`.
        block_rows: rows whose logits are held at a time; None: as many as have 16 million.

    Source: Cut Cross-Entropy (Wijmans et al. 2024) and Liger Kernel (Hsu et al. 2024), which make
    the gradients in the forward pass; a loss scale is not known there.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        block_rows: int | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.block_rows = label_smoothing, block_rows

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        """The loss of `x` (..., in_features) for `target` (...), int64; without it the logits."""
        if target is None:
            return super().forward(x)
        return linear_cross_entropy(
            x,
            self.weight,
            target,
            self.bias,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            block_rows=self.block_rows,
        )


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    block_rows: int | None = None,
) -> Tensor:
    """``cross_entropy(F.linear(x, weight, bias), target, ...)``, see :class:`LinearCrossEntropy`.

    Arguments:
        x: shape (..., in_features).
        weight: shape (classes, in_features).
        target: shape (...), int64.
        bias: shape (classes,).
        ignore_index, reduction, label_smoothing: as in :func:`ampfuse.nn.cross_entropy`.
        block_rows: rows whose logits are held at a time; None: as many as have 16 million.

    Returns:
        float32: a scalar, or with "none" a loss for each target.

    Raises:
        ValueError: `target` has another shape than `x` without its last dimension, or the wrong
            type; what :func:`ampfuse.nn.cross_entropy` raises.
    """
    if target.shape != x.shape[:-1] or target.dtype != torch.int64:
        raise ValueError(
            f"target must be int64 of shape {tuple(x.shape[:-1])}, that of x without the last "
            f"dimension; got {target.dtype} of shape {tuple(target.shape)}."
        )
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    rows, targets = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    with torch.autocast(x.device.type, enabled=False):
        if rows.shape[0] == 0:
            return cross_entropy(F.linear(rows, weight, bias), targets, reduction=reduction)
        block = block_rows or max(1, _BLOCK_LOGITS // weight.shape[0])
        losses = _Blocks.apply(rows, weight, bias, targets, ignore_index, label_smoothing, block)
        return reduce_losses(losses, target, None, ignore_index, reduction)


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        label_smoothing: float,
        block: int,
    ) -> Tensor:
        options = ignore_index, label_smoothing
        pairs = [
            torch.ops.ampfuse.cross_entropy_loss(F.linear(some, weight, bias), t, None, *options)
            for some, t in zip(x.split(block), target.split(block), strict=True)
        ]
        losses, lse = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        ctx.save_for_backward(x, weight, bias, target, lse)
        ctx.options, ctx.block = options, block
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias, target, lse = ctx.saved_tensors
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        # Sums over blocks are FP32, as those within a product are.
        single = ctx.block >= x.shape[0]
        dw = torch.zeros_like(weight, dtype=torch.float32) if not single else None
        db = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        for begin in range(0, x.shape[0], ctx.block):
            part = slice(begin, begin + ctx.block)
            logits = F.linear(x[part], weight, bias)
            dz = torch.ops.ampfuse.cross_entropy_gradient(
                gradient[part].contiguous(),
                logits,
                target[part],
                None,
                lse[2 * begin :],
                *ctx.options,
            )
            if dx is not None:
                torch.mm(dz, weight, out=dx[part])
            if ctx.needs_input_grad[1]:
                product = dz.t().mm(x[part])
                dw = product if dw is None else dw.add_(product)
            if db is not None:
                db += dz.sum(0, dtype=torch.float32)
        dw = dw.to(weight.dtype) if ctx.needs_input_grad[1] and dw is not None else None
        return dx, dw, None if db is None else db.to(bias.dtype), None, None, None, None
