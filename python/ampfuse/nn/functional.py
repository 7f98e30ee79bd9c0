"""The functions of ``ampfuse.nn``. Where they are fused, each takes one pass forward and one
backward; other layouts, dtypes and devices go to torch's operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import _reduction as _Reduction

from ampfuse.torch_utils import FLOAT_DTYPES, HALF_DTYPES

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "batch_norm_act",
    "bias_act",
    "cross_entropy",
    "gated_act",
    "layer_norm",
    "linear_cross_entropy",
    "patch_conv2d",
    "rms_norm",
    "split_qkv",
]

Activation = Literal["relu"] | None
Reduction = Literal["mean", "sum", "none"]
Shape = int | Sequence[int]

# ---- norms ---------------------------------------------------------------------------------------


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
    tensors = x, residual, weight, bias, running_mean, running_var
    relu = is_relu(activation)
    return torch.ops.ampfuse.batch_norm_act(*tensors, training, momentum, eps, relu)


def is_relu(activation: str | None) -> bool:
    """Whether it is "relu". Raises ValueError unless it is "relu" or None."""
    if activation not in (None, "relu"):
        raise ValueError(f'activation must be None or "relu", not {activation!r}.')
    return activation is not None


def same_shape_and_dtype(a: Any, b: Any) -> bool:
    """Whether both are tensors, of one shape and dtype."""
    are_tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    return are_tensors and a.shape == b.shape and a.dtype == b.dtype


def layer_norm(
    x: Tensor,
    normalized_shape: Shape,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """``F.layer_norm`` with statistics and weights in FP32, whatever the dtypes.

    It is fused for float32, float16 and bfloat16 on CPU and CUDA. Everything else goes to torch's
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
        eps: is added to the mean of the squares; None: the machine epsilon of the type that is
            computed in (FP32, or FP64).

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
    """``layer_norm(x + residual, ...)`` and the sum, which a pre-norm transformer needs next.

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
    """``rms_norm(x + residual, ...)`` and the sum.

    Arguments:
        residual: as in :func:`add_layer_norm`.
        x, normalized_shape, weight, eps: as in :func:`rms_norm`.
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
    """The layer norm (centered) or RMS norm; with a residual also the sum."""
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    if not shape or list(x.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"normalized_shape {tuple(shape)} does not match the last dimensions of x, which has "
            f"shape {tuple(x.shape)}."
        )
    if eps is None:
        eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    return torch.ops.ampfuse.norm(x, residual, shape, weight, bias, eps, centered)


# ---- activations ---------------------------------------------------------------------------------


def bias_act(x: Tensor, bias: Tensor | None = None, activation: str = "gelu") -> Tensor:
    """``activation(x + bias)``, computed in FP32 and rounded once.

    The product before it then need not add the bias (``F.linear(x, weight)``), and the backward
    pass also sums the bias's gradient. It is fused for float32, float16 and bfloat16 on CPU and
    CUDA. Everything else goes to torch's operations, and so do second derivatives. Before it is
    rounded, the result is exact to 1.5e-5 for half types and to 2e-6 for float32.

    Arguments:
        x: shape (..., columns).
        bias: shape (columns,); float32 or of the dtype of `x`, where it is fused.
        activation: "gelu", "gelu_tanh" (``F.gelu(approximate="tanh")``) or "silu".

    Returns:
        A tensor of the shape and dtype of `x`.

    Raises:
        ValueError: `activation` is none of these.

    Source: ``F.gelu`` (Hendrycks & Gimpel 2016) and ``F.silu`` (Elfwing et al. 2017).
    """
    return torch.ops.ampfuse.activation(x, None, bias, activation)


def gated_act(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """``activation(gate) * up``: SwiGLU with "silu", GeGLU with "gelu" (Shazeer 2020).

    It is computed in FP32 and rounded once; both gradients take one pass. See :func:`bias_act`.

    Arguments:
        gate, up: of one shape and dtype, where it is fused.
        activation: as in :func:`bias_act`.

    Returns:
        A tensor of their shape, of the dtype of `gate`.

    Raises:
        ValueError: `activation` is none of these.
    """
    return torch.ops.ampfuse.activation(gate, up, None, activation)


# ---- attention and patches, of torch's operations alone ------------------------------------------


def split_qkv(packed: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values for ``F.scaled_dot_product_attention``, as views of `packed`.

    The backward pass copies each of the three gradients once, to its place in the gradient of
    `packed`. That of ``reshape(...).permute(2, 0, 3, 1, 4).unbind(0)`` stacks them and then copies
    the stack, because of the permutation.

    Arguments:
        packed: shape (..., tokens, 3 * heads * width): the queries of all heads, then the keys,
            then the values, of any dtype.

    Returns:
        Three tensors of shape (..., heads, tokens, width).

    Raises:
        ValueError: the last dimension of `packed` is not a multiple of ``3 * heads``.

    Source: the packed projections of GPT-2 (Radford et al. 2019) and of timm's ``Attention``.
    """
    if packed.dim() < 2 or packed.shape[-1] % (3 * heads):
        raise ValueError(
            f"packed must have shape (..., tokens, {3 * heads} * width), got {tuple(packed.shape)}."
        )
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(-3, -2) for part in packed.chunk(3, -1))
    return q, k, v


def patch_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.conv2d(x, weight, bias, stride=weight.shape[2:])``: one copy of the image, and a product.

    Patches do not overlap, so the copy is as large as the image. The product adds the bias.

    Arguments:
        x: shape (N, C, H, W), of any dtype. Rows and columns beyond the last whole patch are
            ignored.
        weight: shape (O, C, height, width).
        bias: shape (O,).

    Returns:
        Shape (N, O, H // height, W // width), in ``torch.channels_last`` if `x` or `weight` is.

    Raises:
        ValueError: `x` has other dimensions or channels, or is smaller than a patch.

    Source: the patch embedding of ViT (Dosovitskiy et al. 2020), ``F.conv2d``.
    """
    if not has_patches(x, weight):
        raise ValueError(f"weight {tuple(weight.shape)} does not fit x, {tuple(x.shape)}.")
    height, width = weight.shape[2:]
    rows, columns = x.shape[2] // height, x.shape[3] // width
    patches = x[:, :, : rows * height, : columns * width]
    patches = patches.unflatten(3, (columns, width)).unflatten(2, (rows, height))
    channels_last = _is_channels_last(x)
    patches = patches.permute((0, 2, 4, 3, 5, 1) if channels_last else (0, 2, 4, 1, 3, 5))
    matrix = (weight.permute(0, 2, 3, 1) if channels_last else weight).flatten(1)
    y = F.linear(patches.flatten(3), matrix, bias).permute(0, 3, 1, 2)
    return y if channels_last or _is_channels_last(weight) else y.contiguous()


def has_patches(x: Tensor, weight: Tensor) -> bool:
    """Whether `x` is a batch of images that hold a patch of the shape of `weight`."""
    large = all(a >= b for a, b in zip(x.shape[2:], weight.shape[2:], strict=False))
    return x.dim() == 4 and x.shape[1] == weight.shape[1] and large


def _is_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


# ---- losses --------------------------------------------------------------------------------------

_MIN_COPIED_CLASSES = 128  # the kernels take so many classes of a row at once
_BLOCK_LOGITS = 1 << 24  # logits of a block, unless block_rows is given


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

    The forward pass reads the logits once and keeps two numbers of each row. The backward pass
    reads them again and writes their gradient in their own dtype, over the logits if nothing else
    refers to them any more. torch makes an FP32 copy of half logits and keeps its ``log_softmax``.
    Second derivatives (``create_graph=True``) come from torch's operations.

    It is fused for classes as targets and float32, float16 or bfloat16 logits on CPU and CUDA, of
    shape (C,), (N, C) or (N, C, d1, ...), whose classes are contiguous in memory, as in a
    channels-last layout. Half logits of 128 classes or more in another layout are copied to this
    one. Everything else, probabilities as targets too, goes to torch's operations, in FP32.

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

    Source: ``F.cross_entropy``. The logits are read once, as by Milakov & Gimelshein (2018), whose
    running maximum is an exponent of 2 here.
    """
    if size_average is not None or reduce is not None:
        reduction = _Reduction.legacy_get_string(size_average, reduce)  # type: ignore[assignment]
    _check_loss_options(reduction, label_smoothing)
    rows = _rows(input, target, weight)
    if rows is None:
        if input.dtype in HALF_DTYPES:
            input = input.float()
            target = target.float() if target.is_floating_point() else target
        return F.cross_entropy(
            input, target, weight, None, ignore_index, None, reduction, label_smoothing
        )
    if weight is not None:
        weight = weight.float().contiguous()
    losses = torch.ops.ampfuse.cross_entropy(
        rows, target.reshape(-1).contiguous(), weight, ignore_index, label_smoothing
    )
    return _reduce(losses, target, weight, ignore_index, reduction)


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
        if not is_half or last.shape[-1] < _MIN_COPIED_CLASSES:
            return None
    return last.reshape(-1, last.shape[-1]).contiguous()


def _reduce(
    losses: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: Reduction
) -> Tensor:
    """`reduction` of the losses of all targets; that of an ignored target is zero."""
    if reduction == "none":
        return losses.view(target.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / total_weight(target, weight, ignore_index)


def total_weight(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The sum of the weights of all targets that count; without `weight` their number."""
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    return (weight[target.masked_fill(~counts, 0)] * counts).sum()


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
            type; `block_rows` is below 1; what :func:`ampfuse.nn.cross_entropy` raises.
    """
    if block_rows is not None and block_rows < 1:
        raise ValueError(f"block_rows must be at least 1, or None; got {block_rows}.")
    _check_loss_options(reduction, label_smoothing)
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
            loss = cross_entropy(F.linear(rows, weight, bias), targets, reduction=reduction)
            return loss.view(target.shape) if reduction == "none" else loss
        block = block_rows or max(1, _BLOCK_LOGITS // weight.shape[0])
        losses = _LinearCrossEntropy.apply(
            rows, weight, bias, targets, ignore_index, label_smoothing, block
        )
        return _reduce(losses, target, None, ignore_index, reduction)


def _check_loss_options(reduction: str, label_smoothing: float) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", not {reduction!r}.')
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, not {label_smoothing}.")


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss of each row of `x`, from the logits of `block` rows at a time."""

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
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        dx = torch.empty_like(x) if needs_dx else None
        # Sums over several blocks are FP32, as those within a product are.
        is_one_block = ctx.block >= x.shape[0]
        sums_dw = needs_dw and not is_one_block
        dw = torch.zeros_like(weight, dtype=torch.float32) if sums_dw else None
        db = torch.zeros_like(bias, dtype=torch.float32) if needs_db else None
        for begin in range(0, x.shape[0], ctx.block):
            part = slice(begin, begin + ctx.block)
            logits = F.linear(x[part], weight, bias)
            part_lse = lse[2 * begin :]  # two numbers for each row
            dz = torch.ops.ampfuse.cross_entropy_gradient(
                gradient[part].contiguous(), logits, target[part], None, part_lse, *ctx.options
            )
            if dx is not None:
                torch.mm(dz, weight, out=dx[part])
            if needs_dw:
                product = dz.t().mm(x[part])
                dw = product if dw is None else dw.add_(product)
            if db is not None:
                db += dz.sum(0, dtype=torch.float32)
        dw = None if dw is None else dw.to(weight.dtype)
        db = None if db is None else db.to(bias.dtype)
        return dx, dw, db, None, None, None, None
