"""``apex.parallel.DistributedDataParallel`` on torch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ampfuse.compat.apex.apex_C import flatten, unflatten

# apex leaves each process its own running statistics. torch 2.14 has a new name for that.
_HAS_NEW_NAME = (
    "forward_sync_buffers"
    in inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
)
_NO_SYNC_OF_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if _HAS_NEW_NAME else "broadcast_buffers": False
}


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's ``DistributedDataParallel`` with apex's arguments. Wrap after ``amp.initialize``.

    Arguments:
        module: on one device, the same on all processes.
        message_size: elements per all-reduce.
        delay_allreduce: accept parameters that get no gradient in a pass.
        allreduce_always_fp32: sum half gradients in FP32.
        gradient_average: divide the sum by the number of processes.
        gradient_predivide_factor: divide by this before the sum, and by the rest after it.
        retain_allreduce_buffers, allreduce_trigger_params, num_allreduce_streams,
            allreduce_communicators, gradient_average_split_factor, prof: without effect.

    Raises:
        ValueError: `shared_param`, which apex gave up.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Any = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: Any = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        if shared_param is not None:
            raise ValueError(
                "shared_param has no meaning: shared parameters need no word. For parameters that "
                "may get no gradient pass delay_allreduce=True."
            )
        super().__init__(
            module,
            find_unused_parameters=bool(delay_allreduce),
            bucket_cap_mb=max(1, message_size * 4 // 2**20),
            **_NO_SYNC_OF_BUFFERS,
        )
        self.gradient_average = gradient_average
        self.gradient_predivide_factor = float(gradient_predivide_factor)
        self.allreduce_always_fp32 = allreduce_always_fp32
        if allreduce_always_fp32 or not gradient_average or self.gradient_predivide_factor != 1.0:
            self.register_comm_hook(None, self._reduce)

    # torch compares the annotations of a hook with its types, and these would be strings.
    def _reduce(self, _, bucket):  # type: ignore[no-untyped-def]
        buffer = bucket.buffer()
        summed = buffer.float() if self.allreduce_always_fp32 else buffer
        before = self.gradient_predivide_factor
        if before != 1.0:
            summed.div_(before)
        after = dist.get_world_size(self.process_group) / before if self.gradient_average else 1.0

        def finish(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            total = future.value()[0]
            if after != 1.0:
                total.div_(after)
            return total if total is buffer else buffer.copy_(total)

        work = dist.all_reduce(summed, group=self.process_group, async_op=True)
        return work.get_future().then(finish)


class Reducer:
    """Averages gradients, or any tensors, over all processes when asked.

    Arguments:
        module_or_grads_list: a module, whose parameters are broadcast from the first process now
            and whose gradients ``reduce()`` averages; or a list of tensors to average.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Tensor]) -> None:
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            for param in self.module.parameters():
                dist.broadcast(param.detach(), 0)
        else:
            self.grads = list(module_or_grads_list)

    def reduce(self) -> None:
        """All-reduce and divide by the number of processes, in place."""
        tensors = self.grads
        if self.module is not None:
            tensors = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat_dist_call(tensors, dist.all_reduce)


@torch.no_grad()
def flat_dist_call(
    tensors: Iterable[Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """``call(flat, *extra_args)`` on all tensors of one type as a flat one, in place.

    ``torch.distributed.all_reduce`` averages: the sum is divided by the number of processes.
    """
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
