"""Modules on the functions: batch norms, also over several processes, and the last linear layer
with its loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from ampfuse import _core
from ampfuse.dtypes import FLOAT_DTYPES
from ampfuse.nn.functional import (
    Activation,
    Reduction,
    batch_norm_act,
    is_relu,
    linear_cross_entropy,
    same_shape_and_dtype,
)


class BatchNormAct2d(nn.BatchNorm2d):
    """``activation(BatchNorm2d(x) + residual)``.

    State dict, attributes and behaviour in each mode are those of ``nn.BatchNorm2d``.

    Arguments:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as in torch.
        activation: "relu" or None.

    Raises:
        ValueError: an unknown activation.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: Activation = "relu",
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        is_relu(activation)
        self.activation = activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalize `x` (N, C, H, W), add `residual` of the same shape, apply the activation."""
        return normalize(self, x, residual, is_relu(self.activation))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}"


def normalize(norm: _BatchNorm, x: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """The ``forward`` of torch's batch norms, of `norm` on `x`; then add and ReLU."""
    norm._check_input_dim(x)
    momentum = _count_batch(norm)
    mean, var, eps = norm.running_mean, norm.running_var, norm.eps
    training = norm.training or (mean is None and var is None)
    if norm.training and not norm.track_running_stats:
        mean = var = None  # statistics that are not tracked are left alone, if there are any
    act: Activation = "relu" if relu else None
    return batch_norm_act(
        x, mean, var, norm.weight, norm.bias, training, momentum, eps, residual, act
    )


def _count_batch(norm: _BatchNorm) -> float:
    """The batch's share in the running statistics; in training the batch is counted."""
    batches: Any = norm.num_batches_tracked
    if norm.training and norm.track_running_stats and batches is not None:
        batches.add_(1)
        if norm.momentum is None:  # a cumulative average
            return 1.0 / float(batches)
    return norm.momentum or 0.0


@contextlib.contextmanager
def recompute_norms() -> Iterator[None]:
    """Forward passes in this block keep fewer activations; results have the same bits.

    Between a batch norm and the convolution that follows it, autograd keeps two tensors of one
    size: the input of each. With this it keeps the first, and the backward pass computes the second
    from it when it needs it, in one more pass over memory each time. This covers the outputs of
    fused batch norms (:func:`ampfuse.nn.fuse`, :class:`BatchNormAct2d`, ``batch_norm_act``)
    to which no residual is added, whatever operation saves them.

    A block around the forward pass and the loss is enough::

        with ampfuse.nn.recompute_norms():
            loss = loss_function(model(x), y)
        loss.backward()

    Under ``torch.compile`` it does nothing: the compiler decides what is kept.

    Source: the memory-efficient DenseNets of Pleiss et al. (arXiv:1707.06990), which share the
    outputs of batch norms and recompute them; ``torch.autograd.graph.saved_tensors_hooks``.
    """
    if torch.compiler.is_compiling():
        yield
        return
    saved = _core.C.SavedTensor
    with torch.autograd.graph.saved_tensors_hooks(saved, saved.unpack):
        yield


# ---- batch norms over several processes, on CPUs too, for apex's ---------------------------------


def sync_normalize(norm: Any, x: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """The ``forward`` of ``nn.SyncBatchNorm``, of `norm` on `x` (N, C, ...); then add and ReLU."""
    images = _as_images(x)
    fits = images.is_contiguous(memory_format=torch.channels_last) and x.dtype in FLOAT_DTYPES
    together = norm.training and dist.is_available() and dist.is_initialized()
    if not together or dist.get_world_size(norm.process_group) == 1:
        if fits:
            return normalize(norm, x, residual, relu)
        return _add_relu(_BatchNorm.forward(norm, x), residual, relu)  # as if x were images
    if x.is_cuda and not fits:
        out = nn.SyncBatchNorm.forward(norm, x)  # has kernels for that, but only on GPUs
        return _add_relu(out, residual, relu)

    norm._check_input_dim(x)
    momentum = _count_batch(norm)
    same = residual is None or same_shape_and_dtype(residual, x)
    other = _dense(_as_images(residual)) if residual is not None and same else None
    parameters = (None if p is None else p.float() for p in (norm.weight, norm.bias))
    tracked = (norm.running_mean, norm.running_var) if norm.track_running_stats else (None, None)
    group = norm.process_group if norm.process_group is not None else dist.group.WORLD
    out = _SyncBatchNormAct.apply(
        _dense(images), other, *parameters, *tracked, momentum, norm.eps, relu and same, group
    )
    out = out.to(x.dtype).view(x.shape)
    if x.is_contiguous():
        out = out.contiguous()
    return out if same else _add_relu(out, residual, relu)


def _add_relu(x: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    out = x if residual is None else x + residual
    return F.relu(out) if relu else out


def _as_images(x: Tensor) -> Tensor:
    """`x` (N, C, ...) with four dimensions: a view where `x` is dense."""
    return x.flatten(3) if x.dim() > 4 else x[(..., *(None,) * (4 - x.dim()))]


def _dense(x: Tensor) -> Tensor:
    x = x if x.dtype in FLOAT_DTYPES else x.float()
    return x.contiguous(memory_format=torch.channels_last)


class _SyncBatchNormAct(torch.autograd.Function):
    """`x` and `residual` dense in channels-last, of one dtype; parameters float32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        relu: bool,
        group: Any,
    ) -> Tensor:
        mean, variance, count = _moments_of_all(x, group)
        if running_mean is not None and running_var is not None:
            _move(running_mean, mean, momentum)
            _move(running_var, variance * (count / (count - 1)), momentum)
        invstd = torch.rsqrt(variance + eps)
        if x.numel():
            out, mask = torch.ops.ampfuse.batch_norm_apply(
                x, residual, mean, invstd, weight, bias, relu
            )
        else:
            out, mask = torch.empty_like(x), x.new_empty(0, dtype=torch.uint8)
        ctx.save_for_backward(x, weight, mean, invstd, mask, count)
        ctx.group = group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, mask, count = ctx.saved_tensors
        ops, has_residual = torch.ops.ampfuse, ctx.needs_input_grad[1]
        dy = grad.contiguous(memory_format=torch.channels_last)
        sums = mean.new_zeros(2, x.size(1))
        if x.numel():
            *both, masked = ops.batch_norm_reduce(dy, x, mean, mask, has_residual)
            sums = torch.stack(both)
            if has_residual:
                dy, mask = masked, mask.new_empty(0)
        dx, means = None, sums.clone()
        if ctx.needs_input_grad[0]:
            dist.all_reduce(means, group=ctx.group)
            means /= count
            dx = x
            if x.numel():
                dx = ops.batch_norm_dx(dy, mask, x, mean, invstd, weight, *means)
        return (
            dx,
            dy if has_residual else None,
            sums[1] * invstd if ctx.needs_input_grad[2] else None,
            sums[0] if ctx.needs_input_grad[3] else None,
            *(None,) * 6,
        )


def _moments_of_all(x: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance of each channel, (C,), and the count, (1,), over all processes."""
    channels = x.size(1)
    moments = x.new_zeros(2 * channels + 1, dtype=torch.float32)
    moments[-1] = x.numel() // channels
    if x.numel():
        torch.cat(torch.ops.ampfuse.batch_norm_moments(x), out=moments[:-1])
    every = moments.new_empty(dist.get_world_size(group), moments.numel())
    dist.all_gather(list(every.unbind()), moments, group)
    means, variances, counts = every.split([channels, channels, 1], dim=1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    # Around the common mean: the difference of two large sums would cancel.
    variance = (counts * (variances + (means - mean) ** 2)).sum(0) / count
    return mean, variance, count


def _move(running: Tensor, new: Tensor, momentum: float) -> None:
    running.copy_(torch.lerp(running.float(), new, momentum))


# ---- losses --------------------------------------------------------------------------------------


class LinearCrossEntropy(nn.Linear):
    """``F.cross_entropy(linear(x), target)`` without the logits of all rows in memory.

    It is meant for many classes: in a language model with a vocabulary of 128k, the logits and
    their gradient are most of the memory of a step. Here the logits of one block of rows are
    computed, reduced to losses and discarded. The backward pass computes them again, then their
    gradient, and the products with it. That is a third more products in this layer.

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
