"""The processes of one training, as ``torchrun`` starts them; alone, a world of one.

torchrun ends the others when one of them fails. Of a model in shards, whole states and whole tests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as whole_states
from torch.distributed.fsdp import FSDPModule

from ampfuse.experiments.arms import Arm


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
        self._device = device
        if self.size > 1:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        try:
            yield
        finally:
            if self.size > 1:
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


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Context in which each process has the whole `model`: in evaluation nobody waits for the
    others, who may have another number of batches."""
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


def states_of(arm: Arm) -> tuple[dict[str, Any], dict[str, Any]]:
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
    states = {"model_state_dict": model, "optim_state_dict": optimizer}
    options = whole_states.StateDictOptions(full_state_dict=True)
    whole_states.set_state_dict(arm.bare_model, arm.optimizer, **states, options=options)
