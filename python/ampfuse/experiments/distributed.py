"""The processes of one training, as ``torchrun`` starts them, and models sharded by FSDP2."""

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
from torch.optim import Optimizer

from ampfuse.command_line import UsageError
from ampfuse.experiments.settings import HALF_LEVELS, Settings


@dataclasses.dataclass
class World:
    """This process among those of the training; 0 of 1 without torchrun."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def of_environment(cls) -> World:
        get = os.environ.get
        return cls(int(get("RANK", 0)), int(get("WORLD_SIZE", 1)), int(get("LOCAL_RANK", 0)))

    @contextlib.contextmanager
    def connected(self, device: torch.device) -> Iterator[None]:
        """Context with a process group: NCCL between GPUs, gloo between CPUs."""
        if self.size > 1:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        try:
            yield
        finally:
            if self.size > 1:
                dist.destroy_process_group()

    def gather(self, mine: Any) -> list[Any]:
        """The values of all processes, by rank. All must call this."""
        everyone = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(everyone, mine)
        return everyone

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes, element by element. All must call this."""
        return [sum(column) for column in zip(*self.gather(values), strict=True)]


def check(settings: Settings, world: World, device: torch.device) -> None:
    """Raise UsageError for flags that do not work together or in so many processes."""
    if settings.sync_bn and device.type != "cuda":
        raise UsageError("--sync_bn: torch synchronizes batch norm only between GPUs")
    if settings.graph and world.size > 1:
        raise UsageError("--graph: capture under torchrun is not supported; leave it out")
    if settings.fsdp and world.size == 1:
        raise UsageError("--fsdp needs several processes; start them with torchrun")
    if settings.fsdp and "resne" not in settings.model:
        raise UsageError(f"--fsdp: only ResNets can be sharded, not {settings.model}")
    if settings.fsdp and settings.fuse and settings.precision in HALF_LEVELS:
        raise UsageError("--fsdp --fuse: batch norms among half weights are sharded apart")


# ---- shards --------------------------------------------------------------------------------------


def shard(model: nn.Module, *, separate_norms: bool) -> None:
    """Leave each process a shard of `model`, a ResNet, gathered block by block. With
    `separate_norms`, batch norms are gathered separately: they stay FP32 among half weights, and
    what FSDP gathers together has one dtype."""
    # Scores are such a view, but nothing writes to them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    model.to(memory_format=torch.contiguous_format)  # FSDP supports no other for weights
    for part in (*model.layer1, *model.layer2, *model.layer3, *model.layer4, model):
        norms = [module for module in part.modules() if isinstance(module, _BatchNorm)]
        norms = [norm for norm in norms if not isinstance(norm, FSDPModule)]
        if separate_norms and norms:
            fully_shard(norms)
        fully_shard(part)
    model.register_forward_pre_hook(_broadcast_buffers)


def _broadcast_buffers(model: nn.Module, inputs: Any) -> None:
    """Take batch norm statistics of rank 0, as DistributedDataParallel does."""
    if model.training and (buffers := list(model.buffers())):
        dist._broadcast_coalesced(dist.group.WORLD, buffers, 250 * 2**20, 0)


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Context in which each process has the whole `model`: in evaluation, processes may have
    different numbers of batches, so they must not wait for each other."""
    parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
    try:
        for part in parts:
            part.unshard()
            part.set_reshard_after_forward(False, recurse=False)
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not model, recurse=False)
            part.reshard()


def states_of(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of both, gathered from shards. All processes must call this."""
    if not isinstance(model, FSDPModule):
        return model.state_dict(), optimizer.state_dict()
    options = whole_states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    return whole_states.get_state_dict(model, optimizer, options=options)


def load_states(
    model: nn.Module,
    optimizer: Optimizer,
    model_state: dict[str, Any],
    optimizer_state: dict[str, Any],
) -> None:
    """Load states of :func:`states_of`. All processes must call this."""
    if not isinstance(model, FSDPModule):
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
        return
    states = {"model_state_dict": model_state, "optim_state_dict": optimizer_state}
    options = whole_states.StateDictOptions(full_state_dict=True)
    whole_states.set_state_dict(model, optimizer, **states, options=options)
