"""``apex.normalization.fused_layer_norm`` on ampfuse's layer and RMS norms.

They normalize over the last dimensions, `normalized_shape`. Statistics and weights are applied in
FP32 whatever the types, and the result is rounded once: to the input's type, or, by the ``Mixed``
variants, to the weights' type. `memory_efficient` has no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ampfuse.nn import layer_norm, rms_norm


def _mixed(
    norm: Callable[..., Tensor], input: Tensor, shape: Any, eps: Any, *params: Tensor
) -> Tensor:
    """`norm`, with a result of the weights' type."""
    if params[0].dtype == input.dtype:
        return norm(input, shape, *params, eps=eps)
    return norm(input.float(), shape, *params, eps=eps).to(params[0].dtype)


def fused_layer_norm(
    input: Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    return layer_norm(input, normalized_shape, eps=eps)


def fused_layer_norm_affine(
    input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Any, eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    return layer_norm(input, normalized_shape, weight, bias, eps=eps)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor, weight: Tensor, bias: Tensor, normalized_shape: Any, eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    return _mixed(layer_norm, input, normalized_shape, eps, weight, bias)


def fused_rms_norm(
    input: Tensor, normalized_shape: Any, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    return rms_norm(input, normalized_shape, eps=eps)


def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Any, eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    return rms_norm(input, normalized_shape, weight, eps=eps)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Any, eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:  # fmt: skip
    return _mixed(rms_norm, input, normalized_shape, eps, weight)


class _FusedNorm(nn.Module):
    """Mixin before torch's class: apex's constructor, and inputs of other types than weights."""

    _function: Callable[..., Tensor]
    _mixed = False

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:  # fmt: skip
        if self._mixed and not elementwise_affine:
            name = type(self).__name__
            raise RuntimeError(f"{name} has weights; to have none, use the class without Mixed.")
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: Tensor) -> Tensor:
        layer: Any = self  # of torch's class, too
        params = [p for p in (layer.weight, getattr(layer, "bias", None)) if p is not None]
        shape, eps = layer.normalized_shape, layer.eps
        if self._mixed:
            return _mixed(self._function, input, shape, eps, *params)
        return self._function(input, shape, *params, eps=eps)


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
