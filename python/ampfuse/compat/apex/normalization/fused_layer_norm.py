"""``apex.normalization.fused_layer_norm`` on ``torch.nn.LayerNorm`` and ``RMSNorm``.

Where input and weights differ in type, statistics and weights are applied in FP32 and the result is
rounded once: to the input's type, or in the ``Mixed`` classes to the weights'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = int | Sequence[int]

# As in a package, Python looks for modules where names are missing, and is told (left_out.py).
__path__: list[str] = []


def fused_layer_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6) -> Tensor:
    """Layer norm over the last dimensions, which are `normalized_shape`; the input's dtype."""
    return _norm(F.layer_norm, input, [], normalized_shape, eps, input.dtype)


def fused_layer_norm_affine(
    input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Shape, eps: float = 1e-6
) -> Tensor:
    """Layer norm with weight and bias of `normalized_shape`; the input's dtype."""
    return _norm(F.layer_norm, input, [weight, bias], normalized_shape, eps, input.dtype)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Shape, eps: float = 1e-6
) -> Tensor:
    """Layer norm with weight and bias of `normalized_shape`; the weight's dtype."""
    return _norm(F.layer_norm, input, [weight, bias], normalized_shape, eps, weight.dtype)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float | None = 1e-6) -> Tensor:
    """RMS norm over the last dimensions, which are `normalized_shape`; the input's dtype."""
    return _norm(F.rms_norm, input, [], normalized_shape, eps, input.dtype)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float | None = 1e-6
) -> Tensor:
    """RMS norm with a weight of `normalized_shape`; the input's dtype."""
    return _norm(F.rms_norm, input, [weight], normalized_shape, eps, input.dtype)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float | None = 1e-6
) -> Tensor:
    """RMS norm with a weight of `normalized_shape`; the weight's dtype."""
    return _norm(F.rms_norm, input, [weight], normalized_shape, eps, weight.dtype)


def _norm(
    norm: Callable[..., Tensor],
    x: Tensor,
    params: Sequence[Tensor],
    shape: Shape,
    eps: float | None,
    out: torch.dtype,
) -> Tensor:
    if any(param.dtype != x.dtype for param in params):
        x, params = x.float(), [param.float() for param in params]
    return norm(x, _as_list(shape), *params, eps=eps).to(out)


def _as_list(shape: Shape) -> list[int]:
    return [shape] if isinstance(shape, int) else list(shape)


class _FusedNorm(nn.Module):
    """Mixin before torch's class: apex's constructor, and a result of the input's type."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        shape = _as_list(normalized_shape)
        super().__init__(shape, eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient

    def _out(self, input: Tensor) -> torch.dtype:
        return input.dtype


class _MixedNorm(_FusedNorm):
    def __init__(self, normalized_shape: Shape, eps: float = 1e-5, **kwargs: Any) -> None:
        if not kwargs.pop("elementwise_affine", True):
            name = type(self).__name__
            raise RuntimeError(f"{name} has weights; without, use the class that is not Mixed.")
        super().__init__(normalized_shape, eps, True, **kwargs)

    def _out(self, input: Tensor) -> torch.dtype:
        return next(self.parameters()).dtype


class FusedLayerNorm(_FusedNorm, nn.LayerNorm):
    """``nn.LayerNorm`` that takes inputs of another type than its weights.

    Arguments:
        normalized_shape, eps, elementwise_affine: as ``nn.LayerNorm``'s.
        memory_efficient: accepted and without effect.
    """

    def forward(self, input: Tensor) -> Tensor:
        params = [self.weight, self.bias] if self.elementwise_affine else []
        out = self._out(input)
        return _norm(F.layer_norm, input, params, self.normalized_shape, self.eps, out)


class FusedRMSNorm(_FusedNorm, nn.RMSNorm):
    """``nn.RMSNorm`` that takes inputs of another type than its weights.

    Arguments:
        normalized_shape, eps, elementwise_affine: as ``nn.RMSNorm``'s.
        memory_efficient: accepted and without effect.
    """

    def forward(self, input: Tensor) -> Tensor:
        params = [self.weight] if self.elementwise_affine else []
        out = self._out(input)
        return _norm(F.rms_norm, input, params, self.normalized_shape, self.eps, out)


class MixedFusedLayerNorm(_MixedNorm, FusedLayerNorm):
    """A :class:`FusedLayerNorm` whose output has the weights' type."""


class MixedFusedRMSNorm(_MixedNorm, FusedRMSNorm):
    """A :class:`FusedRMSNorm` whose output has the weights' type."""
