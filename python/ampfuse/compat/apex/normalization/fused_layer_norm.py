"""``apex.normalization.fused_layer_norm`` on ampfuse's layer and RMS norms.

Statistics and weights are applied in FP32 whatever the types, and the result is rounded once: to
the input's type, or in the ``Mixed`` classes to the weights'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ampfuse.nn import layer_norm, rms_norm

Shape = int | Sequence[int]

# As in a package, Python looks for modules where names are missing, and is told (left_out.py).
__path__: list[str] = []


def fused_layer_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6) -> Tensor:
    """Layer norm over the last dimensions, which are `normalized_shape`; the input's dtype."""
    return _norm(layer_norm, input, normalized_shape, eps)


def fused_layer_norm_affine(
    input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Shape, eps: float = 1e-6
) -> Tensor:
    """Layer norm with weight and bias of `normalized_shape`; the input's dtype."""
    return _norm(layer_norm, input, normalized_shape, eps, weight, bias)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Shape, eps: float = 1e-6
) -> Tensor:
    """Layer norm with weight and bias of `normalized_shape`; the weight's dtype."""
    return _norm(layer_norm, input, normalized_shape, eps, weight, bias, mixed=True)


def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float | None = 1e-6) -> Tensor:
    """RMS norm over the last dimensions, which are `normalized_shape`; the input's dtype."""
    return _norm(rms_norm, input, normalized_shape, eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float | None = 1e-6
) -> Tensor:
    """RMS norm with a weight of `normalized_shape`; the input's dtype."""
    return _norm(rms_norm, input, normalized_shape, eps, weight)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float | None = 1e-6
) -> Tensor:
    """RMS norm with a weight of `normalized_shape`; the weight's dtype."""
    return _norm(rms_norm, input, normalized_shape, eps, weight, mixed=True)


def _norm(
    norm: Callable[..., Tensor],
    input: Tensor,
    shape: Shape,
    eps: float | None,
    *params: Tensor,
    mixed: bool = False,
) -> Tensor:
    if not mixed or params[0].dtype == input.dtype:
        return norm(input, shape, *params, eps=eps)
    return norm(input.float(), shape, *params, eps=eps).to(params[0].dtype)


class _FusedNorm(nn.Module):
    """Mixin before torch's class: apex's constructor, and inputs of another type than the weights.

    Arguments:
        normalized_shape, eps, elementwise_affine: as ``nn.LayerNorm``'s.
        memory_efficient: accepted and without effect.
    """

    _function: Callable[..., Tensor]
    _mixed = False

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        if self._mixed and not elementwise_affine:
            name = type(self).__name__
            raise RuntimeError(f"{name} has weights; without, use the class that is not Mixed.")
        shape: Any = normalized_shape
        super().__init__(shape, eps=eps, elementwise_affine=elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        layer: Any = self  # of torch's class, too
        params = [p for p in (layer.weight, getattr(layer, "bias", None)) if p is not None]
        shape, eps = layer.normalized_shape, layer.eps
        return _norm(self._function, input, shape, eps, *params, mixed=self._mixed)


class FusedLayerNorm(_FusedNorm, nn.LayerNorm):
    """``nn.LayerNorm`` that takes inputs of another type than its weights."""

    _function = staticmethod(layer_norm)


class FusedRMSNorm(_FusedNorm, nn.RMSNorm):
    """``nn.RMSNorm`` that takes inputs of another type than its weights."""

    _function = staticmethod(rms_norm)


class MixedFusedLayerNorm(FusedLayerNorm):
    """A :class:`FusedLayerNorm` whose output has the weights' type."""

    _mixed = True


class MixedFusedRMSNorm(FusedRMSNorm):
    """A :class:`FusedRMSNorm` whose output has the weights' type."""

    _mixed = True
