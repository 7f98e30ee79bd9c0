"""Batch normalization with what follows it in most networks: the add of a residual, and a ReLU."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["batch_norm_act"]

Activation = Literal["relu"] | None


def batch_norm_act(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    activation: Activation = None,
) -> Tensor:
    """``activation(F.batch_norm(x, ...) + residual)``, forward and backward in one pass each.

    The passes are fused for images in ``torch.channels_last``; everything else (another memory
    format or dtype, half parameters) goes to torch's operations.

    Arguments:
        x: shape (N, C, ...), float32, float16 or bfloat16 where it is fused.
        running_mean, running_var, weight, bias: shape (C,), float32 where it is fused.
        training: use the batch's statistics, and move the running ones towards them.
        momentum: the batch's share in the running statistics.
        eps: is added to the variance.
        residual: of the shape and dtype of `x`, where it is fused.
        activation: None or "relu".

    Returns:
        A tensor of the shape, dtype and memory format of `x`.

    Raises:
        ValueError: an unknown activation; in training, one value per channel only.

    Source: ``F.batch_norm``.
    """
    if training:
        F._verify_batch_size(x.size())  # type: ignore[attr-defined]
    relu = is_relu(activation)
    return torch.ops.ampfuse.batch_norm_act(
        x, residual, weight, bias, running_mean, running_var, training, momentum, eps, relu
    )


def is_relu(activation: str | None) -> bool:
    """Whether it is "relu". Raises ValueError unless it is "relu" or None."""
    if activation not in (None, "relu"):
        raise ValueError(f'activation must be None or "relu", not {activation!r}.')
    return activation is not None


def add_relu(x: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """``relu(x + residual)`` by torch's operations, each where it is asked for."""
    out = x if residual is None else x + residual
    return F.relu(out) if relu else out
