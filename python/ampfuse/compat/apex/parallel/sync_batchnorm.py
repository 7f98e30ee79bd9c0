"""``apex.parallel.SyncBatchNorm`` on the one of ``ampfuse.nn``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampfuse.nn.sync_batch_norm import sync_normalize


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
        if not self.channel_last:
            return sync_normalize(self, input, z, self.fuse_relu)
        x, residual = (t if t is None else t.movedim(-1, 1) for t in (input, z))
        assert x is not None
        return sync_normalize(self, x, residual, self.fuse_relu).movedim(1, -1)


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """`module` with every batch norm in it replaced by a :class:`SyncBatchNorm`.

    Parameters and running statistics are taken over, the same tensors. `module` is changed in place
    and returned, unless it is a batch norm itself.
    """
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        options = module.eps, module.momentum, module.affine, module.track_running_stats
        new = SyncBatchNorm(module.num_features, *options, process_group, channel_last)
        new._parameters.update(module._parameters)
        new._buffers.update(module._buffers)
        return new.train(module.training)
    for name, child in module.named_children():
        module._modules[name] = convert_syncbn_model(child, process_group, channel_last)
    return module


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
