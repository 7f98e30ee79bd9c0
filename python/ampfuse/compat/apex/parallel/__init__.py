"""``apex.parallel`` on ``torch.nn.parallel``, and its ``SyncBatchNorm``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampfuse.compat.apex.apex_C import flatten, unflatten
from ampfuse.compat.apex.parallel.sync_batchnorm import SyncBatchNorm
from ampfuse.optim import larc as LARC

__all__ = [
    "LARC", "DistributedDataParallel", "Reducer", "SyncBatchNorm", "convert_syncbn_model",
    "create_syncbn_process_group", "flat_dist_call",
]  # fmt: skip

# apex.parallel.LARC is a module, and the class in it is ampfuse's own.
sys.modules[f"{__name__}.LARC"] = LARC

# apex leaves each process its own running statistics. torch 2.14 has a new name for that.
_NAMES = inspect.signature(nn.parallel.DistributedDataParallel).parameters
_SYNC = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's ``DistributedDataParallel`` with apex's arguments. Wrap after ``amp.initialize``.

    `message_size`: elements per all-reduce. `delay_allreduce`: accept parameters that get no
    gradient in a pass. `allreduce_always_fp32`: sum half gradients in FP32. `gradient_average`:
    divide the sum by the number of processes; by `gradient_predivide_factor` before it, by the rest
    after it. `shared_param`: a ValueError; apex gave it up. The others have no effect.
    """

    def __init__(
        self, module: nn.Module, message_size: int = 10_000_000, delay_allreduce: bool = False,
        shared_param: Any = None, allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: Any = False, allreduce_always_fp32: bool = False,
        num_allreduce_streams: Any = 1, allreduce_communicators: Any = None,
        gradient_average: bool = True, gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: Any = None, prof: Any = False,
    ) -> None:  # fmt: skip
        if shared_param is not None:
            raise ValueError(
                "shared_param is not supported: shared parameters work without it. If some get no "
                "gradient, pass delay_allreduce=True."
            )
        super().__init__(
            module,
            find_unused_parameters=bool(delay_allreduce),
            bucket_cap_mb=max(1, message_size * 4 // 2**20),
            **dict[str, Any]({_SYNC: False}),
        )
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = float(gradient_predivide_factor)
        self.allreduce_always_fp32 = allreduce_always_fp32
        plain = self.gradient_average and self.gradient_predivide_factor == 1.0
        if self.allreduce_always_fp32 or not plain:
            self.register_comm_hook(None, self._reduce)

    def disable_allreduce(self) -> None:
        """Leave out the all-reduce from the next ``forward`` on, as in ``no_sync()``."""
        with self.no_sync():  # amp averages what models accumulate whose no_sync was called
            pass
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Undo :meth:`disable_allreduce`; the next pass reduces what has accumulated, too."""
        self.require_backward_grad_sync = True

    # torch compares the annotations of a hook with its types, and these would be strings.
    def _reduce(self, _, bucket):  # type: ignore[no-untyped-def]
        buffer = bucket.buffer()
        summed = buffer.float() if self.allreduce_always_fp32 else buffer
        before = self.gradient_predivide_factor
        if before != 1.0:
            summed.div_(before)
        after = dist.get_world_size(self.process_group) / before if self.gradient_average else 1.0

        def finish(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            total = future.value()[0] if after == 1.0 else future.value()[0].div_(after)
            return total if total is buffer else buffer.copy_(total)

        work = dist.all_reduce(summed, group=self.process_group, async_op=True)
        return work.get_future().then(finish)


class Reducer:
    """Averages over all processes when asked: tensors, or a module's gradients.

    The constructor broadcasts a module's parameters from the first process.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Tensor]) -> None:
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            flat_dist_call(self.module.parameters(), dist.broadcast, (0,))
        else:
            self.grads = list(module_or_grads_list)

    def reduce(self) -> None:
        """All-reduce and divide by the number of processes, in place."""
        params = self.module.parameters() if self.module is not None else ()
        grads = self.grads + [param.grad for param in params if param.grad is not None]
        flat_dist_call(grads, dist.all_reduce)


@torch.no_grad()
def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """``call(flat, *extra_args)`` on all tensors of a type as one, in place; a sum is averaged."""
    alike: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in alike.values():
        flat = flatten(group)
        call(flat, *(extra_args or ()))
        if call is dist.all_reduce:
            flat.div_(dist.get_world_size())
        for tensor, value in zip(group, unflatten(flat, group), strict=True):
            tensor.copy_(value)


def convert_syncbn_model(
    module: nn.Module, process_group: Any = None, channel_last: bool = False
) -> nn.Module:
    """Replace every batch norm in `module` by a :class:`SyncBatchNorm` of the same tensors.

    `module` is changed in place and returned, unless it is a batch norm itself.
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
    """Split all processes, which call it, into groups; returns this process's, None for size 0."""
    if group_size == 0:
        return None
    if group_size < 0 or dist.get_world_size() % group_size:
        raise ValueError(
            f"{dist.get_world_size()} processes cannot form groups of {group_size}: group_size "
            "must divide the number of processes."
        )
    return dist.new_subgroups(group_size)[0]
