"""How the model of a training is spread over its processes: alone, copied, or in shards."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as whole_states
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from ampfuse.experiments.arms import Arm
from ampfuse.experiments.config import HALF_LEVELS, RunConfig
from ampfuse.experiments.distributed import World

States = tuple[dict[str, Any], dict[str, Any]]  # of model and optimizer


def spread_of(config: RunConfig, world: World) -> Spread:
    return Spread() if world.size == 1 else Shards(config) if config.fsdp else Copies()


class Spread:
    """One process has it all. The others override what they do differently.

    States are those of the whole model and optimizer, whatever the spread: a training that was
    saved under one can go on under another.
    """

    def before(self, model: nn.Module) -> None:
        """What `model`, on its device, needs before there is an optimizer."""

    def after(self, arm: Arm) -> None:
        """What the model needs when it is in `arm`."""

    @contextlib.contextmanager
    def evaluated(self, arm: Arm) -> Iterator[nn.Module]:
        """The model to call in evaluation, where nobody waits for the others: they may have
        different numbers of batches."""
        yield arm.model

    def states(self, arm: Arm) -> States:
        """To be saved by the main process. All have to ask."""
        return arm.bare_model.state_dict(), arm.optimizer.state_dict()

    def load(self, arm: Arm, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Put `arm` into these states. All have to."""
        arm.bare_model.load_state_dict(model)
        arm.optimizer.load_state_dict(optimizer)


class Copies(Spread):
    """Each process has a model, which starts from the main one's weights."""

    def after(self, arm: Arm) -> None:
        ids = [arm.device.index] if arm.device.type == "cuda" else None
        arm.replace_model(lambda m: nn.parallel.DistributedDataParallel(m, device_ids=ids))

    @contextlib.contextmanager
    def evaluated(self, arm: Arm) -> Iterator[nn.Module]:
        yield arm.bare_model


class Shards(Spread):
    """Each process has a share of each parameter (FSDP2), block by block."""

    def __init__(self, config: RunConfig) -> None:
        self._is_half = config.arm in HALF_LEVELS

    def before(self, model: nn.Module) -> None:
        # Scores that are a view of something: nobody writes to them.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
        model.to(memory_format=torch.contiguous_format)  # FSDP takes no others; images keep theirs
        for block in (*blocks(model), model):
            # What is gathered together is of one type, and these stay FP32 among half weights.
            if self._is_half and (norms := [m for m in block.modules() if _is_free_norm(m)]):
                fully_shard(norms)
            fully_shard(block)
        model.register_forward_pre_hook(_take_buffers_of_main)

    @contextlib.contextmanager
    def evaluated(self, arm: Arm) -> Iterator[nn.Module]:
        parts = [part for part in arm.bare_model.modules() if isinstance(part, FSDPModule)]
        for part in parts:
            part.unshard()
            part.set_reshard_after_forward(False, recurse=False)
        yield arm.bare_model
        for part in parts:
            part.set_reshard_after_forward(part is not arm.bare_model, recurse=False)
            part.reshard()

    def states(self, arm: Arm) -> States:
        options = whole_states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = whole_states.get_state_dict(
            arm.bare_model, arm.optimizer, options=options
        )
        return model, _numbered(optimizer, arm) if optimizer else {}

    def load(self, arm: Arm, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        whole_states.set_state_dict(
            arm.bare_model,
            arm.optimizer,
            model_state_dict=model,
            optim_state_dict=_named(optimizer, arm),
            options=whole_states.StateDictOptions(full_state_dict=True),
        )


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


def _names(arm: Arm) -> list[str]:
    return [name for name, _ in arm.bare_model.named_parameters()]


def _numbered(optimizer: dict[str, Any], arm: Arm) -> dict[str, Any]:
    """The state of an optimizer by parameters' names, by their numbers instead."""
    numbers = {name: i for i, name in enumerate(_names(arm))}
    state = {numbers[name]: of for name, of in optimizer["state"].items()}
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    return {**optimizer, "state": state, "param_groups": groups}


def _named(optimizer: dict[str, Any], arm: Arm) -> dict[str, Any]:
    """The inverse of :func:`_numbered`."""
    names = _names(arm)
    state = {names[i]: of for i, of in optimizer["state"].items()}
    groups = [
        {**group, "params": [names[i] for i in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    return {**optimizer, "state": state, "param_groups": groups}
