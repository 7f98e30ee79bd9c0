"""``apex.contrib.groupbn.BatchNorm2d_NHWC`` on the batch norms of ``ampfuse.nn``."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampfuse.compat.apex.parallel.sync_batchnorm import create_syncbn_process_group
from ampfuse.nn.batch_norm import normalize
from ampfuse.nn.sync_batch_norm import sync_normalize


class BatchNorm2d_NHWC(_BatchNorm):
    """Batch norm of images (N, H, W, C), with an add and a ReLU, over `bn_group` processes.

    Arguments:
        num_features: C.
        fuse_relu: apply a ReLU to the result.
        bn_group: how many processes of neighbouring ranks share their statistics.
        max_cta_per_sm, cta_launch_margin, multi_stream: how apex's kernels are launched; without
            effect.

    Raises:
        ValueError: the number of processes is no multiple of `bn_group`, or there is no process
            group.
    """

    def __init__(
        self,
        num_features: int,
        fuse_relu: bool = False,
        bn_group: int = 1,
        max_cta_per_sm: int = 2,
        cta_launch_margin: int = 12,
        multi_stream: bool = False,
    ) -> None:
        super().__init__(num_features)
        self.fuse_relu = fuse_relu
        self.bn_group = bn_group
        self.max_cta_per_sm = max_cta_per_sm
        self.cta_launch_margin = cta_launch_margin
        self.multi_stream = multi_stream
        if bn_group > 1:
            dist.get_world_size()  # says that there is no process group
            _neighbours(bn_group, dist.group.WORLD)

    _check_input_dim = nn.BatchNorm2d._check_input_dim
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    @property
    def process_group(self) -> Any:  # not kept: a group neither copies nor pickles
        return _neighbours(self.bn_group, dist.group.WORLD)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalize `x` (N, H, W, C), add `z` of the same shape if given."""
        run = sync_normalize if self.bn_group > 1 else normalize
        residual = None if z is None else z.movedim(-1, 1)
        return run(self, x.movedim(-1, 1), residual, self.fuse_relu).movedim(1, -1)


@functools.cache
def _neighbours(size: int, world: Any) -> Any:
    """One group for all batch norms, of each size and each start of torch.distributed."""
    return create_syncbn_process_group(size)
