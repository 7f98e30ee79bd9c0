"""Patch embeddings: a convolution whose stride is its kernel, as a matrix product."""

from __future__ import annotations

from typing import Any

from torch import nn

from ampfuse.dtypes import HALF_DTYPES
from ampfuse.nn.functional import has_patches, patch_conv2d

_MIN_PIXELS = 8  # for smaller patches the copy costs more than the convolution


def takes_patches(module: Any) -> bool:
    """Whether `module` is a convolution of such patches, of at least 8 pixels each way."""
    return (
        isinstance(module, nn.Conv2d)
        and type(module).forward is nn.Conv2d.forward
        and type(module)._conv_forward is nn.Conv2d._conv_forward
        and module.kernel_size == module.stride
        and min(module.kernel_size) >= _MIN_PIXELS
        and module.padding in ((0, 0), "valid")
        and module.dilation == (1, 1)
        and module.groups == 1
    )


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The ``forward`` of such a convolution."""
    usual = len(args) == 1 and not kwargs and takes_patches(self)
    # On CPUs a convolution in FP32 is as fast.
    if (
        not usual
        or not has_patches(args[0], self.weight)
        or (args[0].is_cpu and args[0].dtype not in HALF_DTYPES)
    ):
        return type(self).forward(self, *args, **kwargs)
    return patch_conv2d(args[0], self.weight, self.bias)
