"""What a run measured: gathered on the device, read once an interval, written as JSON.

A run leaves ``NAME.jsonl``, a line per interval and per evaluation, written as it goes, and at its
end ``NAME.json``, the result.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampfuse.experiments.config import RunConfig
from ampfuse.experiments.files import file_name, finite


class StepLog:
    """Loss, loss scale and skip of the steps of one interval, on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._values = torch.zeros(size, 3, device=device)
        self._used = 0

    def add(self, loss: Tensor, loss_scale: Tensor, skipped: Tensor) -> None:
        torch.stack((loss, loss_scale, skipped), out=self._values[self._used])
        self._used += 1

    def flush(self) -> tuple[list[float], list[float], list[bool]]:
        """The interval so far, then forgotten. Waits for the device."""
        losses, scales, skipped = self._values[: self._used].T.tolist()
        self._used = 0
        return losses, scales, [bool(value) for value in skipped]


@dataclasses.dataclass
class Record:
    """What one run measured so far; :meth:`state` and ``Record(**state)`` carry it over a break."""

    step_ms: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)  # of every step
    skipped_steps: int = 0
    memory_bytes: int = 0
    epoch_log: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    test: dict[str, Any] | None = None
    epoch_start: int = 0  # steps of finished epochs
    epoch_start_s: float = 0.0
    started: str = dataclasses.field(default_factory=lambda: now())

    def state(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def time_s(self) -> float:
        return sum(self.step_ms) / 1e3

    def add_interval(
        self,
        step: int,
        step_ms: Sequence[float],
        losses: Sequence[float],
        skipped: Sequence[bool],
        memory_bytes: int,
    ) -> list[int]:
        """Take in the interval that ended with step number `step` (from 1).

        Returns:
            the numbers of the steps that were skipped in it.
        """
        first = step - len(losses) + 1
        self.step_ms += step_ms
        self.losses += losses
        self.skipped_steps += sum(skipped)
        self.memory_bytes = max(self.memory_bytes, memory_bytes)
        return [first + i for i, was_skipped in enumerate(skipped) if was_skipped]

    def end_epoch(self, epoch: int, test: dict[str, Any] | None) -> None:
        """An epoch (from 1) has ended, evaluated or not."""
        losses = self.losses[self.epoch_start :]
        self.epoch_log.append(
            {
                "epoch": epoch,
                "train_time_s": self.time_s - self.epoch_start_s,
                "train_loss": mean_of_finite(losses),
                "test_loss": test and test["loss"],
                "test_accuracy": test and test["accuracy"],
            }
        )
        self.epoch_start, self.epoch_start_s = len(self.losses), self.time_s

    def summary(self, images_per_step: int) -> dict[str, Any]:
        """The figures of a result, from the steps that were timed."""
        times = self.step_ms
        quintiles = statistics.quantiles(times, n=5, method="inclusive") if times[1:] else times * 4
        tail = self.losses[-1] if self.losses else None
        return {
            "timed_iterations": len(times),
            "train_time_s": self.time_s,
            "images_per_s": {
                "mean": images_per_step * len(times) / self.time_s,
                "min": images_per_step / max(times) * 1e3,
                "max": images_per_step / min(times) * 1e3,
            }
            if times
            else None,
            "step_time_ms": {
                "median": statistics.median(times),
                "p20": quintiles[0],
                "p80": quintiles[3],
                "mean": statistics.fmean(times),
            }
            if times
            else None,
            "train_loss": {
                "last": tail,
                "mean": mean_of_finite(self.losses),
            },
            "test": self.test,
            "epoch_log": self.epoch_log,
            "skipped_steps": self.skipped_steps,
            "memory_bytes": self.memory_bytes,
        }


class LogFile:
    """``NAME.jsonl``: one line of JSON per interval or evaluation, out at once."""

    def __init__(self, path: Path, keep_to_step: int = 0) -> None:
        """`keep_to_step`: of a log that is there already, keep the lines up to this step."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if keep_to_step and path.exists():
            for line in path.read_text().splitlines():
                if json.loads(line)["step"] <= keep_to_step:
                    kept.append(line + "\n")
        path.write_text("".join(kept))

    def write(self, kind: str, values: dict[str, Any]) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(finite({"kind": kind, **values}), allow_nan=False) + "\n")


def mean_of_finite(losses: Sequence[float]) -> float | None:
    """The mean without inf and NaN, which a skipped step may have had; None of nothing."""
    finite_ones = [loss for loss in losses if math.isfinite(loss)]
    return statistics.fmean(finite_ones) if finite_ones else None


def run_name(config: RunConfig) -> str:
    """The stem of a run's files: what it is, and when, so that no run replaces another's."""
    length = f"i{config.iterations}" if config.iterations else f"e{config.epochs}"
    when = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]
    parts = [config.experiment, config.model, config.method, f"b{config.batch_size}", length]
    return file_name("-".join([*parts, f"r{config.repeat}", when]))


def now() -> str:
    """The time in UTC, as results hold it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
