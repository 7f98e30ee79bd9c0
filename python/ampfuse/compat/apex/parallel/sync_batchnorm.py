"""``apex.parallel.sync_batchnorm``: batch norm over several processes, on GPUs and CPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from ampfuse.nn.functional import same_shape_and_dtype
from ampfuse.nn.modules import count_batch, normalize
from ampfuse.torch_utils import FLOAT_DTYPES


# torch's class cannot be the base: DistributedDataParallel refuses it on the CPU.
class SyncBatchNorm(_BatchNorm):
    """Batch norm over the batches of all processes, on GPUs and CPUs.

    It extends torch's: with `channel_last` the input's channels are its last dimension, with
    `fuse_relu` a ReLU is applied to the result.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1,
        affine: bool = True, track_running_stats: bool = True, process_group: Any = None,
        channel_last: bool = False, fuse_relu: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group, self.channel_last = process_group, channel_last
        self.fuse_relu = fuse_relu

    _check_input_dim = nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize `input` (N, C, ...), add `z` of the same shape if given."""
        if not self.channel_last:
            return _normalize(self, input, z, self.fuse_relu)
        x, residual = (t if t is None else t.movedim(-1, 1) for t in (input, z))
        assert x is not None
        return _normalize(self, x, residual, self.fuse_relu).movedim(1, -1)


def _normalize(norm: Any, x: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
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
    momentum = count_batch(norm)
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
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None,
        running_mean: Tensor | None, running_var: Tensor | None, momentum: float, eps: float,
        relu: bool, group: Any,
    ) -> Tensor:  # fmt: skip
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
        sums, dweight = mean.new_zeros(2, x.size(1)), torch.zeros_like(mean)
        if x.numel():
            *both, dweight, masked = ops.batch_norm_reduce(dy, x, mean, invstd, mask, has_residual)
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
            dweight if ctx.needs_input_grad[2] else None,
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
