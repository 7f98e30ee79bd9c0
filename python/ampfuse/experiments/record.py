"""What a run measures: a :class:`Record` while it runs, a :class:`RunResult` when it has ended.

A run leaves ``NAME.jsonl`` (:mod:`run_log`), written as it goes, and at its end ``NAME.json``, the
result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import math
import re
import statistics
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ampfuse.experiments.config import RunConfig
from ampfuse.files import atomic

FORMAT = 1  # of the result files


def now() -> str:
    """The time in UTC, as results hold it."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


@dataclasses.dataclass
class Record:
    """What one run measured so far; checkpoints carry it over a break as a dictionary."""

    step_ms: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)  # of every step
    skipped_steps: int = 0
    memory_bytes: int = 0
    epoch_log: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    test: dict[str, Any] | None = None
    epoch_start: int = 0  # steps of finished epochs
    epoch_start_s: float = 0.0
    started: str = dataclasses.field(default_factory=now)

    @property
    def time_s(self) -> float:
        return sum(self.step_ms) / 1e3

    def end_epoch(self, epoch: int, test: dict[str, Any] | None) -> None:
        """An epoch (from 1) has ended, evaluated or not."""
        loss, time_s = mean_of_finite(self.losses[self.epoch_start :]), self.time_s
        entry = {"epoch": epoch, "train_time_s": time_s - self.epoch_start_s, "train_loss": loss}
        entry |= {f"test_{name}": test and test[name] for name in ("loss", "accuracy")}
        self.epoch_log.append(entry)
        self.epoch_start, self.epoch_start_s = len(self.losses), self.time_s

    def summary(self, images_per_step: int) -> dict[str, Any]:
        """The fields of a result that come of steps; times of those that were timed."""
        times, speed, step_time = self.step_ms, None, None
        if times:
            fifths = (
                statistics.quantiles(times, n=5, method="inclusive") if times[1:] else times * 4
            )
            mean = statistics.fmean(times)
            step_time = {"median": statistics.median(times), "p20": fifths[0], "p80": fifths[3]}
            step_time["mean"] = mean
            speeds = {"mean": mean, "min": max(times), "max": min(times)}
            speed = {name: images_per_step / ms * 1e3 for name, ms in speeds.items()}
        last = self.losses[-1] if self.losses else None
        return {
            "timed_iterations": len(times),
            "train_time_s": self.time_s,
            "images_per_s": speed,
            "step_time_ms": step_time,
            "train_loss": {"last": last, "mean": mean_of_finite(self.losses)},
            **{name: getattr(self, name) for name in ("test", "epoch_log", "skipped_steps")},
            "memory_bytes": self.memory_bytes,
            "started": self.started,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """One result file: its fields, in the order in which they stand there.

    Fields without a default are those that every file has; ``path`` is where it was read.
    """

    format: int = FORMAT
    experiment: str
    recipe: str | None = None
    model: str
    data: dict
    gpu: str
    device: dict
    world_size: int
    environment: dict
    command: list = dataclasses.field(default_factory=list)
    arm: str
    method: str
    loop: str
    batch_size: int
    repeat: int
    repeats: int = 1
    seed: int
    switches: dict
    optimizer: dict
    diverged: dict | None
    timed_iterations: int
    train_time_s: float | None
    images_per_s: dict | None
    step_time_ms: dict | None = None
    train_loss: dict | None
    test: dict | None
    epoch_log: list = dataclasses.field(default_factory=list)
    skipped_steps: int = 0
    memory_bytes: int | None
    loss_scale: float | None = None
    policy: dict | None = None
    memory_kind: str | None
    kernels: dict = dataclasses.field(default_factory=dict)
    iterations: int
    epochs: float
    started: str = ""
    finished: str
    path: Path | None = None

    @classmethod
    def of(cls, config: RunConfig, **measured: Any) -> RunResult:
        """The result of a run of `config` that ends now; `measured` is the rest of the fields."""
        names = ("experiment", "recipe", "model", "arm", "method", "loop", "batch_size", "repeat")
        switches = ("channels_last", "cudnn_benchmark", "graph", "compile", "deterministic")
        switches += ("fsdp",) * config.fsdp
        rule = ("lr", "momentum", "weight_decay", "clip", "schedule", "warmup")
        return cls(
            **{name: getattr(config, name) for name in names},
            repeats=config.repeats,
            seed=config.seed + config.repeat,
            switches={name: getattr(config, name) for name in switches},
            optimizer={"name": config.optimizer, **{name: getattr(config, name) for name in rule}},
            finished=now(),
            **measured,
        )

    def write(self, path: Path) -> None:
        """As JSON, with null in place of what JSON cannot say (NaN, infinity)."""
        values = {name: getattr(self, name) for name in _TYPES if name != "path"}
        with atomic(path) as file:
            file.write(json.dumps(finite(values), indent=1, allow_nan=False).encode() + b"\n")

    @classmethod
    def read(cls, path: Path) -> RunResult:
        """Raises ValueError, KeyError or OSError if `path` is no result file of this format."""
        with open(path, encoding="utf-8") as file:
            values = json.load(file, parse_constant=_no_constant)
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f'"format" is not {FORMAT}')
        for field in dataclasses.fields(cls):
            if field.name not in values and field.default is field.default_factory:
                raise KeyError(field.name)  # neither has a default
            if field.name in values and not isinstance(values[field.name], _TYPES[field.name]):
                raise ValueError(f'"{field.name}" is {json.dumps(values[field.name])[:40]}')
        return cls(
            **{name: values[name] for name in _TYPES.keys() & values.keys()} | {"path": path}
        )

    @property
    def time_s(self) -> float | None:
        """Training time of all iterations, also where the first ones could not be timed."""
        if self.diverged or not self.timed_iterations or self.train_time_s is None:
            return None
        return self.train_time_s * (self.iterations / self.timed_iterations)

    @property
    def accuracy_pct(self) -> float | None:
        accuracy = self.figure("test", "accuracy")
        return None if accuracy is None else 100 * accuracy

    def figure(self, part: str, name: str) -> float | None:
        """`name` of a `part` of a run that came to its end, as the mean of "images_per_s"."""
        values = getattr(self, part)
        return None if self.diverged or not values else values[name]

    @functools.cached_property
    def conditions(self) -> dict[str, Any]:
        """All that two runs must share to be repeats of each other, except `experiment`, `model`,
        `gpu`, `method`, `batch_size` and their length. Plain values by name."""
        source = self.data.get("source")
        conditions = {
            "arm": self.arm,
            "recipe": self.recipe,
            # Of a folder one wants to know what it holds, not where it lies.
            "data": source if source in ("digits", "synthetic") else self.data.get("kind"),
            **{name: self.data[name] for name in sorted(self.data) if name not in _NOT_CHOSEN},
            "loop": self.loop,
            "world_size": self.world_size,
            **self.switches,
            "optimizer": self.optimizer.get("name"),
            **{name: value for name, value in self.optimizer.items() if name != "name"},
            **(self.policy or {}),
            "device": self.device["name"],
            **{name: self.environment.get(name) for name in ("torch", "ampfuse")},
        }
        nested = {n: json.dumps(v) for n, v in conditions.items() if isinstance(v, (dict, list))}
        return conditions | nested

    def log(self, kind: str) -> list[dict[str, Any]]:
        """The lines of that `kind` ("interval" or "evaluation") in the run's .jsonl, by step."""
        path = self.path and self.path.with_suffix(".jsonl")
        lines = path.read_text("utf-8", "replace").splitlines() if path and path.exists() else ()
        by_step = {}
        for text in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                line = json.loads(text)
                if line["kind"] == kind:
                    by_step[line["step"]] = line
        return [by_step[step] for step in sorted(by_step)]


# JSON has one kind of number.
_TYPES = {
    name: kind | int if float in (kind, *typing.get_args(kind)) else kind
    for name, kind in typing.get_type_hints(RunResult).items()
}
# Said of the data, but no setting: what `data` and the batch come to.
_NOT_CHOSEN = ("source", "device_bytes")


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def finite(value: Any) -> Any:
    """`value` with None for every float that is NaN or infinite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


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


def file_name(text: str) -> str:
    """`text` as a part of a path on any system: "Tesla T4/x" becomes "Tesla T4-x"."""
    return re.sub(r'[<>:"/\\|?*\x00-\x1f]+', "-", text).strip(" .") or "unnamed"
