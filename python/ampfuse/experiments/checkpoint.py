"""Checkpoints: everything a run needs to go on with the same bits, as plain data."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import torch

from ampfuse.experiments.arms import Arm
from ampfuse.experiments.config import RunConfig, UsageError
from ampfuse.files import atomic

_FORMAT = 1


@dataclasses.dataclass
class Checkpoint:
    """One run after `step` steps: `record` is what was measured so far, `name` the stem of its
    files. The weights are FP32 at every level; masters are with the optimizer's state."""

    config: RunConfig
    name: str
    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    rng: dict[str, Any]
    record: dict[str, Any]

    def restore(self, arm: Arm) -> None:
        """Put model, optimizer, scaler and random numbers where they were."""
        arm.bare_model.load_state_dict(self.model)
        arm.optimizer.load_state_dict(self.optimizer)
        for group in arm.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):  # of a captured step, on its device
                group["lr"] = group["lr"].to(arm.device)
        arm.load_scaler_state(self.scaler)
        torch.set_rng_state(self.rng["cpu"])
        if arm.device.type == "cuda" and "cuda" in self.rng:
            torch.cuda.set_rng_state(self.rng["cuda"], arm.device)


def save(path: Path, arm: Arm, *, name: str, step: int, record: dict[str, Any]) -> None:
    """Write the checkpoint of the run in `arm` after `step` steps."""
    rng = {"cpu": torch.get_rng_state()}
    if arm.device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(arm.device)
    values = {
        "format": _FORMAT,
        "config": dataclasses.asdict(arm.config),
        "name": name,
        "step": step,
        "model": arm.bare_model.state_dict(),
        "optimizer": arm.optimizer.state_dict(),
        "scaler": arm.scaler_state(),
        "rng": rng,
        "record": record,
    }
    with atomic(path) as file:
        torch.save(values, file)


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
    names = [field.name for field in dataclasses.fields(Checkpoint)]
    if missing := [name for name in names if name not in values]:
        raise UsageError(f"--resume: {path} lacks {', '.join(missing)}")
    values["config"] = RunConfig.from_dict(values["config"])
    return Checkpoint(**{name: values[name] for name in names})
