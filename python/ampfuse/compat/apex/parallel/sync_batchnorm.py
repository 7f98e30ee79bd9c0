"""``apex.parallel.SyncBatchNorm`` on torch's, which alone refuses CPU tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


# Not a subclass of torch's: DistributedDataParallel refuses that on the CPU.
class SyncBatchNorm(_BatchNorm):
    """Batch norm over the batches of all processes, on GPUs and CPUs.

    Arguments:
        num_features, eps, momentum, affine, track_running_stats, process_group: as in torch.
        channel_last: the input's channels are its last dimension.
        fuse_relu: apply a ReLU to the result.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    _check_input_dim = nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize `input` (N, C, ...), add `z` of the same shape if given."""
        x = input.movedim(-1, 1) if self.channel_last else input
        if self._needs_sync_on_cpu(x):
            out = self._synced_on_cpu(x)
        else:
            out = nn.SyncBatchNorm.forward(self, x)  # type: ignore[arg-type]
        if self.channel_last:
            out = out.movedim(1, -1)
        if z is not None:
            out = out + z
        return F.relu(out) if self.fuse_relu else out

    def _needs_sync_on_cpu(self, x: Tensor) -> bool:
        together = self.training and dist.is_available() and dist.is_initialized()
        return together and x.device.type == "cpu"

    def _group(self) -> Any:
        return self.process_group if self.process_group is not None else dist.group.WORLD

    def _synced_on_cpu(self, x: Tensor) -> Tensor:
        exact = x.float()
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        group = self._group()
        count = torch.full((1,), x.numel() / x.size(1))
        # Two passes: a variance from the sum of squares would cancel.
        total = _AllReduce.apply(torch.cat([exact.sum(dims), count]), group)
        count = total[-1].detach()
        mean = total[:-1] / count
        centred = exact - mean.view(shape)
        variance = _AllReduce.apply((centred * centred).sum(dims), group) / count
        self._track(mean.detach(), variance.detach(), count)
        out = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            out = out * self.weight.float().view(shape) + self.bias.float().view(shape)
        return out.to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        buffers: Any = self  # which may be None
        if not self.track_running_stats or buffers.running_mean is None:
            return
        buffers.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:  # a cumulative average
            momentum = 1.0 / float(buffers.num_batches_tracked)
        unbiased = variance * (count / (count - 1))
        for running, new in ((buffers.running_mean, mean), (buffers.running_var, unbiased)):
            running.copy_((1 - momentum) * running.float() + momentum * new)


class _AllReduce(torch.autograd.Function):
    """The sum over all processes; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """`module` with every batch norm in it replaced by a :class:`SyncBatchNorm`.

    Parameters and running statistics are taken over, the same tensors. `module` is changed in place
    and returned, unless it is a batch norm itself.
    """
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        return _converted(module, process_group, channel_last)
    for name, child in module.named_children():
        converted = convert_syncbn_model(child, process_group, channel_last)
        if converted is not child:
            module._modules[name] = converted
    return module


def _converted(old: _BatchNorm, process_group: Any, channel_last: bool) -> SyncBatchNorm:
    new = SyncBatchNorm(
        old.num_features,
        old.eps,
        old.momentum,
        old.affine,
        old.track_running_stats,
        process_group,
        channel_last,
    )
    new._parameters.update(old._parameters)
    new._buffers.update(old._buffers)
    new.train(old.training)
    return new


def create_syncbn_process_group(group_size: int) -> Any:
    """Split all processes into groups of `group_size`; returns this process's, None for 0.

    Every process has to call it.

    Raises:
        ValueError: the number of processes is no multiple of `group_size`.
    """
    if group_size == 0:
        return None
    world = dist.get_world_size()
    if group_size < 0 or world % group_size:
        raise ValueError(f"{world} processes do not make groups of {group_size}.")
    mine, _ = dist.new_subgroups(group_size)
    return mine
