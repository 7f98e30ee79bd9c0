"""The processes of one training, as ``torchrun`` starts them; alone, a world of one.

torchrun ends the others when one of them fails. A model is spread over the processes as copies
(DistributedDataParallel), or as shards of each of its blocks (FSDP2).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as whole_states
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from ampfuse.experiments.arms import Arm

States = tuple[dict[str, Any], dict[str, Any]]  # of model and optimizer


@dataclasses.dataclass
class World:
    """This process among those of the training, numbered as torchrun does; else 0 of 1."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def of_environment(cls) -> World:
        get = os.environ.get
        return cls(int(get("RANK", 0)), int(get("WORLD_SIZE", 1)), int(get("LOCAL_RANK", 0)))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @contextlib.contextmanager
    def connected(self, device: torch.device) -> Iterator[None]:
        """Meet the others: NCCL between GPUs, gloo between CPUs."""
        if self.size == 1:
            yield
            return
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        self._device = device
        yield
        dist.destroy_process_group()

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes, element by element. All have to ask."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, mine: Any) -> list[Any]:
        """What all processes bring, by rank. All have to ask."""
        everyone = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(everyone, mine)
        return everyone


# ---- shards --------------------------------------------------------------------------------------


def shard(model: nn.Module, *, apart: bool) -> None:
    """Leave each process a share of `model`, gathered block by block. `apart` are its batch norms,
    which stay FP32 among half weights: what is gathered together is of one type."""
    # Scores that are a view of something: nobody writes to them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    model.to(memory_format=torch.contiguous_format)  # FSDP takes no others; images keep theirs
    for block in (*blocks(model), model):
        if apart and (norms := [module for module in block.modules() if _is_free_norm(module)]):
            fully_shard(norms)
        fully_shard(block)
    model.register_forward_pre_hook(_take_buffers_of_main)


_HOLDERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The parts that are gathered one by one: what containers hold, as far as it has weights."""
    for part in model.children():
        if isinstance(part, _HOLDERS):
            yield from blocks(part)
        elif isinstance(model, _HOLDERS) and any(p.ndim > 1 for p in part.parameters()):
            yield part


def _is_free_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, FSDPModule)


def _take_buffers_of_main(model: nn.Module, inputs: Any) -> None:
    """Batch norm's statistics, as DistributedDataParallel does it."""
    if model.training and (buffers := list(model.buffers())):
        dist._broadcast_coalesced(dist.group.WORLD, buffers, 250 * 2**20, 0)


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[nn.Module]:
    """`model`, whole in each process while the block lasts: in evaluation nobody waits for the
    others, who may have another number of batches."""
    parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.unshard()
        part.set_reshard_after_forward(False, recurse=False)
    yield model
    for part in parts:
        part.set_reshard_after_forward(part is not model, recurse=False)
        part.reshard()


def states_of(arm: Arm) -> States:
    """The states of model and optimizer, those of shards gathered. All processes have to ask."""
    if not isinstance(arm.bare_model, FSDPModule):
        return arm.bare_model.state_dict(), arm.optimizer.state_dict()
    options = whole_states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    return whole_states.get_state_dict(arm.bare_model, arm.optimizer, options=options)


def load_states(arm: Arm, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
    """Put `arm` into the states of :func:`states_of`. All processes have to."""
    if not isinstance(arm.bare_model, FSDPModule):
        arm.bare_model.load_state_dict(model)
        arm.optimizer.load_state_dict(optimizer)
        return
    whole_states.set_state_dict(
        arm.bare_model,
        arm.optimizer,
        model_state_dict=model,
        optim_state_dict=optimizer,
        options=whole_states.StateDictOptions(full_state_dict=True),
    )
