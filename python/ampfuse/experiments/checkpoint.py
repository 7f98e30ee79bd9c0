"""Checkpoints: everything a run needs to go on with the same bits, as plain data."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampfuse.experiments.arms import Arm
from ampfuse.experiments.config import RunConfig, UsageError
from ampfuse.files import atomic

_FORMAT = 1


@dataclasses.dataclass
class Checkpoint:
    """One run after `step` steps: `record` is what was measured so far, `name` the stem of its
    files. The weights are FP32 at every level; masters are with the optimizer's state.

    `rng` has a row for each of the `world_size` processes; files of earlier versions have that of
    the first alone, and do not say how many there were.
    """

    config: RunConfig
    name: str
    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    rng: dict[str, Tensor]
    record: dict[str, Any]
    world_size: int | None = None

    def save(self, path: Path) -> None:
        """Write it in the place of what is there: whole, or not at all."""
        values: dict[str, Any] = {"format": _FORMAT}
        values |= {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["config"] = dataclasses.asdict(self.config)
        with atomic(path) as file:
            torch.save(values, file)

    def restore(self, arm: Arm, rank: int) -> None:
        """Put what is not model or optimizer where it was: rates, scaler, random numbers.

        A process beyond those that were saved goes on with the random numbers that it has.
        """
        for group in arm.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # of a captured step, on its device
                group["lr"] = group["lr"].to(arm.device)
        arm.load_scaler_state(self.scaler)
        for name, state in rng_states(arm).items():
            rows = self.rng[name].view(-1, len(state)) if name in self.rng else ()
            if rank < len(rows):
                _set_rng_state(arm, name, rows[rank].clone())  # torch reads from its start


def rng_states(arm: Arm) -> dict[str, Tensor]:
    """Of this process, by kind: uint8 [n]."""
    states = {"cpu": torch.get_rng_state()}
    if arm.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(arm.device)
    return states


def _set_rng_state(arm: Arm, name: str, state: Tensor) -> None:
    if name == "cuda":
        torch.cuda.set_rng_state(state, arm.device)
    else:
        torch.set_rng_state(state)


def load(path: Path) -> Checkpoint:
    """Read `path`, which may come from anywhere: nothing in it is executed."""
    if not path.is_file():
        raise UsageError(f"--resume: there is no file {path}")
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"--resume: {path} cannot be read as a checkpoint ({said})") from error
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise UsageError(f"--resume: {path} is no checkpoint of ampfuse's trainers")
    names = {field.name for field in dataclasses.fields(Checkpoint)}
    if missing := names - {"world_size"} - values.keys():
        raise UsageError(f"--resume: {path} lacks {', '.join(sorted(missing))}")
    values["config"] = RunConfig.from_dict(values["config"])
    return Checkpoint(**{name: values[name] for name in names & values.keys()})
