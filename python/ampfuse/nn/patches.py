"""A convolution of patches that lie side by side, as the product that it is."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampfuse.nn.norm_act import mark_fused
from ampfuse.optim.masters import HALF_DTYPES

_SMALLEST = 8  # Of smaller ones the copy costs more than the convolution.


def patch_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.conv2d(x, weight, bias, stride=weight.shape[2:])``: one copy of the image, and a product.

    Patches do not overlap, so the copy is as large as the image. The product adds the bias.

    Arguments:
        x: shape (N, C, H, W), of any dtype. What is left of H and W beside whole patches does not
            count.
        weight: shape (O, C, height, width).
        bias: shape (O,).

    Returns:
        Shape (N, O, H // height, W // width), in ``torch.channels_last`` if `x` or `weight` is.

    Raises:
        ValueError: `x` has other dimensions or channels, or is smaller than a patch.

    Source: the patch embedding of ViT (Dosovitskiy et al. 2020), ``F.conv2d``.
    """
    if not _fits(x, weight):
        raise ValueError(f"weight {tuple(weight.shape)} does not fit x, {tuple(x.shape)}.")
    height, width = weight.shape[2:]
    rows, columns = x.shape[2] // height, x.shape[3] // width
    patches = x[:, :, : rows * height, : columns * width]
    patches = patches.unflatten(3, (columns, width)).unflatten(2, (rows, height))
    as_it_lies = _is_channels_last(x)
    patches = patches.permute((0, 2, 4, 3, 5, 1) if as_it_lies else (0, 2, 4, 1, 3, 5)).flatten(3)
    columns_of = weight.permute(0, 2, 3, 1) if as_it_lies else weight
    y = F.linear(patches, columns_of.flatten(1), bias).permute(0, 3, 1, 2)
    return y if as_it_lies or _is_channels_last(weight) else y.contiguous()


def _fits(x: Tensor, weight: Tensor) -> bool:
    large = all(a >= b for a, b in zip(x.shape[2:], weight.shape[2:], strict=False))
    return x.dim() == 4 and x.shape[1] == weight.shape[1] and large


def _is_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def takes_patches(module: Any) -> bool:
    """Whether `module` is a convolution of such patches, of at least 8 pixels each way."""
    return (
        isinstance(module, nn.Conv2d)
        and type(module).forward is nn.Conv2d.forward
        and type(module)._conv_forward is nn.Conv2d._conv_forward
        and module.kernel_size == module.stride
        and min(module.kernel_size) >= _SMALLEST
        and module.padding in ((0, 0), "valid")
        and module.dilation == (1, 1)
        and module.groups == 1
    )


@mark_fused
def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The ``forward`` that such a convolution gets."""
    usual = len(args) == 1 and not kwargs and takes_patches(self) and _fits(args[0], self.weight)
    # On CPUs a convolution in FP32 is as fast.
    if not usual or (args[0].is_cpu and args[0].dtype not in HALF_DTYPES):
        return type(self).forward(self, *args, **kwargs)
    return patch_conv2d(args[0], self.weight, self.bias)
