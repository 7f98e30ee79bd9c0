"""Layer and RMS norms, and with the residual addition before them, in one pass each way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Shape = int | Sequence[int]


def layer_norm(
    x: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``F.layer_norm``, statistics and weights in FP32 whatever the types.

    Fused are float32, float16 and bfloat16 on CPU and CUDA. What else there is goes to torch's
    operations, and so do second derivatives (``create_graph=True``).

    Arguments:
        x: shape (..., normalized_shape).
        normalized_shape: the last dimensions, over which mean and variance are taken.
        weight, bias: of that shape; float32 or of the dtype of `x`, where it is fused.
        eps: is added to the variance.

    Returns:
        A tensor of the shape and dtype of `x`.

    Raises:
        ValueError: `x` does not end in `normalized_shape`.

    Source: ``F.layer_norm`` (Ba et al. 2016).
    """
    return normalize_rows(x, None, normalized_shape, weight, bias, eps, centered=True)[0]


def rms_norm(
    x: Tensor, normalized_shape: Shape, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """``F.rms_norm``: as :func:`layer_norm`, without a mean and a bias.

    Arguments:
        x, normalized_shape, weight: as in :func:`layer_norm`.
        eps: is added to the mean of the squares; None: what 1 differs by from the next number, in
            the type that is computed in (FP32, or FP64).

    Returns:
        A tensor of the shape and dtype of `x`.

    Raises:
        ValueError: `x` does not end in `normalized_shape`.

    Source: ``F.rms_norm`` (Zhang & Sennrich 2019).
    """
    return normalize_rows(x, None, normalized_shape, weight, None, eps, centered=False)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """``layer_norm(x + residual, ...)`` and the sum, with which a pre-norm transformer goes on.

    Arguments:
        residual: of the shape and dtype of `x`, where it is fused.
        x, normalized_shape, weight, bias, eps: as in :func:`layer_norm`.

    Returns:
        The norm and ``x + residual``, both of the shape and dtype of `x`.

    Raises:
        ValueError: `x` does not end in `normalized_shape`.
    """
    y, total = normalize_rows(x, residual, normalized_shape, weight, bias, eps, centered=True)
    return y, total


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``rms_norm(x + residual, ...)`` and the sum, as :func:`add_layer_norm`.

    Arguments:
        residual: of the shape and dtype of `x`, where it is fused.
        x, normalized_shape, weight, eps: as in :func:`rms_norm`.

    Returns:
        The norm and ``x + residual``, both of the shape and dtype of `x`.

    Raises:
        ValueError: `x` does not end in `normalized_shape`.
    """
    y, total = normalize_rows(x, residual, normalized_shape, weight, None, eps, centered=False)
    return y, total


def normalize_rows(
    x: Tensor,
    residual: Tensor | None,
    normalized_shape: Shape,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    *,
    centered: bool,
) -> list[Tensor]:
    """The four functions above: the norm, and with a residual the sum."""
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if not shape or list(x.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"normalized_shape {tuple(shape)} does not match the last dimensions of x, which has "
            f"shape {tuple(x.shape)}."
        )
    if eps is None:
        eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    return torch.ops.ampfuse.norm(x, residual, shape, weight, bias, eps, centered)
