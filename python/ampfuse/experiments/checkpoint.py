"""Checkpoints: everything a run needs to go on with the same bits, as plain data."""

from __future__ import annotations

import dataclasses
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampfuse.experiments.arms import Arm
from ampfuse.experiments.config import RunConfig, UsageError
from ampfuse.experiments.record import Record, file_name
from ampfuse.files import atomic

_FORMAT = 1
_KINDS = dict.fromkeys(("config", "model", "optimizer", "scaler", "rng", "record"), dict)
_KINDS |= {"name": str, "step": int}


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
    if not os.path.isfile(path):
        raise UsageError(f"--resume: there is no file {path}")
    with open(path, "rb") as file:
        if not zipfile.is_zipfile(file):
            size = f"{os.path.getsize(path)} bytes"
            raise UsageError(f"--resume: {path} is no checkpoint, or its end is missing ({size})")
    try:
        values = torch.load(path, map_location="cpu", weights_only=True)
    # Damaged files make torch raise nearly anything, and advise to execute what is in them.
    except Exception as error:
        raise UsageError(f"--resume: {path} is damaged, or not of plain data") from error
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise UsageError(f"--resume: {path} is no checkpoint of ampfuse's trainers")
    wrong = [name for name, kind in _KINDS.items() if not isinstance(values.get(name), kind)]
    if wrong or values["name"] != file_name(values["name"]):
        raise UsageError(f"--resume: {path} lacks {', '.join(wrong) or 'the name of a run'}")
    try:
        values["config"] = RunConfig.from_dict(values["config"])
        Record(**values["record"])
    except TypeError as error:  # a field too few or too many
        raise UsageError(f"--resume: {path} is of another version ({error})") from error
    names = [field.name for field in dataclasses.fields(Checkpoint)]
    return Checkpoint(**{name: values[name] for name in names if name in values})
