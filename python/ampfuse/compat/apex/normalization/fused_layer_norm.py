"""``apex.normalization.fused_layer_norm`` on ``torch.nn.LayerNorm`` and ``RMSNorm``.

Where input and weights differ in type, statistics and weights are applied in FP32 and the result is
rounded once: to the input's type, or in the ``Mixed`` classes to the weights'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = int | Sequence[int]

# As in a package, Python looks for modules where names are missing, and is told (left_out.py).
__path__: list[str] = []


def fused_layer_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6) -> Tensor:
    """Layer norm over the last dimensions, which are `normalized_shape`; the input's dtype."""
    return F.layer_norm(input, _shape(normalized_shape), eps=eps)


def fused_layer_norm_affine(
    input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Shape, eps: float = 1e-6
) -> Tensor:
    """Layer norm with weight and bias of `normalized_shape`; the input's dtype."""
    return _layer_norm(input, weight, bias, normalized_shape, eps, input.dtype)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Shape, eps: float = 1e-6
) -> Tensor:
    """Layer norm with weight and bias of `normalized_shape`; the weight's dtype."""
    return _layer_norm(input, weight, bias, normalized_shape, eps, weight.dtype)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float | None = 1e-6) -> Tensor:
    """RMS norm over the last dimensions, which are `normalized_shape`; the input's dtype."""
    return F.rms_norm(input, _shape(normalized_shape), eps=eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float | None = 1e-6
) -> Tensor:
    """RMS norm with a weight of `normalized_shape`; the input's dtype."""
    return _rms_norm(input, weight, normalized_shape, eps, input.dtype)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float | None = 1e-6
) -> Tensor:
    """RMS norm with a weight of `normalized_shape`; the weight's dtype."""
    return _rms_norm(input, weight, normalized_shape, eps, weight.dtype)


class _FusedNorm(nn.Module):
    """Mixin before torch's class: apex's constructor."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(_shape(normalized_shape), eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient


class _MixedNorm(_FusedNorm):
    def __init__(self, normalized_shape: Shape, eps: float = 1e-5, **kwargs: Any) -> None:
        if not kwargs.pop("elementwise_affine", True):
            name = type(self).__name__
            raise RuntimeError(f"{name} has weights; without, use the class that is not Mixed.")
        super().__init__(normalized_shape, eps, True, **kwargs)


class FusedLayerNorm(_FusedNorm, nn.LayerNorm):
    """``nn.LayerNorm`` that takes inputs of another type than its weights.

    Arguments:
        normalized_shape, eps, elementwise_affine: as ``nn.LayerNorm``'s.
        memory_efficient: accepted and without effect.
    """

    def forward(self, input: Tensor) -> Tensor:
        shape = self.normalized_shape
        if not self.elementwise_affine:
            return fused_layer_norm(input, shape, self.eps)
        return fused_layer_norm_affine(input, self.weight, self.bias, shape, self.eps)


class MixedFusedLayerNorm(_MixedNorm, FusedLayerNorm):
    """A :class:`FusedLayerNorm` whose output has the weights' type."""

    def forward(self, input: Tensor) -> Tensor:
        shape = self.normalized_shape
        return mixed_dtype_fused_layer_norm_affine(input, self.weight, self.bias, shape, self.eps)


class FusedRMSNorm(_FusedNorm, nn.RMSNorm):
    """``nn.RMSNorm`` that takes inputs of another type than its weights.

    Arguments:
        normalized_shape, eps, elementwise_affine: as ``nn.RMSNorm``'s.
        memory_efficient: accepted and without effect.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.elementwise_affine:
            return fused_rms_norm(input, self.normalized_shape, self.eps)
        return fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps)


class MixedFusedRMSNorm(_MixedNorm, FusedRMSNorm):
    """A :class:`FusedRMSNorm` whose output has the weights' type."""

    def forward(self, input: Tensor) -> Tensor:
        shape = self.normalized_shape
        return mixed_dtype_fused_rms_norm_affine(input, self.weight, shape, self.eps)


def _shape(normalized_shape: Shape) -> list[int]:
    if isinstance(normalized_shape, int):
        return [normalized_shape]
    return list(normalized_shape)


def _layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, shape: Shape, eps: float, out: torch.dtype
) -> Tensor:
    if x.dtype == weight.dtype == out:
        return F.layer_norm(x, _shape(shape), weight, bias, eps)
    exact = F.layer_norm(x.float(), _shape(shape), weight.float(), bias.float(), eps)
    return exact.to(out)


def _rms_norm(
    x: Tensor, weight: Tensor, shape: Shape, eps: float | None, out: torch.dtype
) -> Tensor:
    if x.dtype == weight.dtype == out:
        return F.rms_norm(x, _shape(shape), weight, eps)
    return F.rms_norm(x.float(), _shape(shape), weight.float(), eps).to(out)
