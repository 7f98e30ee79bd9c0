"""Result files (:func:`result_of` says what is in one), and the rows of tables and figures, which
come from these files (:func:`measured`) and from write-ups (:func:`published`)."""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import math
import os
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import ampfuse
from ampfuse.command_line import UsageError
from ampfuse.devices import device_name

if TYPE_CHECKING:
    from ampfuse.experiments.training import Run

FORMAT = 3  # of result files
Result = dict[str, Any]  # the contents of one
OUT_OF_MEMORY = "out of memory"  # the reason of a run that ended so, under "diverged"
# The script of each recipe, and the title of each script.
RECIPES = {"e1": "cifar", "e2": "cifar", "e3": "cifar", "e4": "imagenet", "e5": "mnist"}
TITLES = {
    "cifar": "CIFAR",
    "imagenet": "ImageNet",
    "mnist": "MNIST",
    "mlp": "MLP",
    "demo": "Digits",
}
VARIANT_ORDER = "FP32 fp32 tf32 FP16 fp16 amp amp-fp16 amp-bf16 O0 O1 O2 O3 O4 O5".split()


# ---- a result file -------------------------------------------------------------------------------

# The settings at the top of a result file, and those that its conditions leave out.
_AT_TOP = "recipe experiment model variant batch_size optimizer repeat".split()
_LEFT_OUT = "repeats seed iterations epochs print_freq evaluate synthetic_size".split()


def result_of(run: Run, reason: str | None = None) -> Result:
    """What `run` has measured: JSON, with None in place of NaN and infinity. `reason` says why it
    ended early."""
    record, settings, variant = run.record, asdict(run.settings), run.variant
    times = record.step_ms or [math.nan]
    mean_ms, images = statistics.fmean(times), run.settings.batch_size * run.world.size
    at_end = (each for each in record.evaluations if each["step"] == run.steps_done)
    test = next(at_end, {"loss": None, "accuracy": None})
    result = {
        "format": FORMAT,
        **{name: settings[name] for name in _AT_TOP},
        "gpu": run.job.label,
        "seed": run.seed,
        "iterations": run.total,  # the intended length if the run diverged
        "epochs": run.total / run.data.batches_per_epoch,
        "time_s": mean_ms * run.total / 1e3,
        "memory_mb": record.memory_bytes / 1e6 or None,
        "memory_kind": run.memory_kind,
        "accuracy_pct": None if test["accuracy"] is None else 100 * test["accuracy"],
        "test_loss": test["loss"],
        "images_per_s": 1e3 * images / mean_ms,
        "images_per_s_min": 1e3 * images / max(times),
        "images_per_s_max": 1e3 * images / min(times),
        "loss_last": record.losses[-1] if record.losses else None,
        "loss_mean": mean_of_finite(record.losses),
        "loss_scale": variant.loss_scale() if variant else None,
        "skipped_steps": record.skipped_steps,
        "diverged": _early_end(run, reason) if reason else None,
        "conditions": {  # what repeats have in common, except the fields above
            **{name: settings[name] for name in settings if name not in (*_AT_TOP, *_LEFT_OUT)},
            **run.data.describe(),
            **(variant.policy if variant else {}),
            "world_size": run.world.size,
            "device": device_name(run.device),
            "torch": str(torch.__version__),
            "ampfuse": ampfuse.__version__,
            "cuda": torch.version.cuda,
        },
        "intervals": record.intervals,
        "evaluations": record.evaluations,
        "finished": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    return json.loads(json.dumps(result), parse_constant=lambda name: None)


def save(result: Result, path: Path) -> None:
    write(path, f"{json.dumps(result, indent=1, allow_nan=False)}\n".encode())


def _early_end(run: Run, reason: str) -> dict[str, Any]:
    """The step after the last finite loss, or that which needed more memory; the reason."""
    if reason == OUT_OF_MEMORY:
        return {"step": min(run.steps_done + 1, run.total), "reason": reason}
    losses = enumerate(run.record.losses, 1)
    last_finite = max((step for step, loss in losses if math.isfinite(loss)), default=0)
    return {"step": min(last_finite + 1, run.steps_done), "reason": reason}


def ending(diverged: dict[str, Any]) -> str:
    """How a run ended early: "diverged in step 3: ..." """
    step, reason = diverged["step"], diverged["reason"]
    if reason == OUT_OF_MEMORY:
        return f"ran out of memory in step {step}"
    return f"diverged in step {step}: {reason}"


def mean_of_finite(losses: Sequence[float]) -> float | None:
    """The mean without inf and NaN of skipped steps; None if nothing is left."""
    finite_ones = [loss for loss in losses if math.isfinite(loss)]
    return statistics.fmean(finite_ones) if finite_ones else None


# ---- rows ----------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Row:
    """One variant at one size: a published line, or all repeats of a run.

    The fields are the columns of the published CSV files and ours; unknown ones are None. "_mean"
    is over the repeats, and "_std" their sample standard deviation; diverged runs contribute to
    memory only. In measured rows, `conditions` has everything else that the repeats have in common,
    and `runs` their result files.
    """

    source: str  # "measured" or "published"
    recipe: str | None
    experiment: str
    model: str
    gpu: str = ""
    variant: str
    batch_size: int | None = None
    optimizer: str | None = None
    iterations: int | None = None
    epochs: float | None = None
    platform: str | None = None
    time_s_mean: float | None = None
    time_s_std: float | None = None
    memory_mb_mean: float | None = None
    memory_mb_std: float | None = None
    accuracy_pct_mean: float | None = None
    accuracy_pct_std: float | None = None
    images_per_s_mean: float | None = None
    images_per_s_std: float | None = None
    loss_last_mean: float | None = None
    loss_last_std: float | None = None
    loss_mean_mean: float | None = None
    loss_mean_std: float | None = None
    images_per_s_min: float | None = None
    images_per_s_max: float | None = None
    n: int | None = None
    note: str = ""
    # Of measured rows.
    memory_kind: str | None = None
    diverged: int | None = None
    skipped_steps: float | None = None  # mean of the runs
    scale: float | None = None  # of the last one
    date: str | None = None
    conditions: dict[str, Any] = field(default_factory=dict)
    runs: list[Result] = field(default_factory=list)


# The figures with a mean and a deviation, and the fields that repeats have in common.
_FIGURES = "time_s memory_mb accuracy_pct images_per_s loss_last loss_mean".split()
SHARED = "recipe experiment model gpu variant batch_size optimizer iterations epochs".split()


def records(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """`rows` without their runs, as flat dictionaries, for a CSV or a DataFrame."""
    flat = [vars(row) | row.conditions for row in rows]
    return [{n: v for n, v in each.items() if n not in ("conditions", "runs")} for each in flat]


def differing(rows: Sequence[Row], shared: Sequence[str]) -> list[str]:
    """The conditions in which those of `rows` differ that have the same `shared` fields."""
    values: dict[tuple[Any, ...], set[str]] = {}
    for row in rows:
        size = [getattr(row, name) for name in shared]
        for name, value in _conditions(row).items():
            values.setdefault((name, *size), set()).add(str(value))
    return list(dict.fromkeys(name for (name, *_), texts in values.items() if len(texts) > 1))


def described(row: Row, names: Iterable[str]) -> str:
    """The conditions `names` of `row`, such as "lr 0.1, graph True"."""
    conditions = _conditions(row)
    return ", ".join(f"{name} {conditions[name]}" for name in names if name in conditions)


def _conditions(row: Row) -> dict[str, Any]:
    optimizer = {"optimizer": row.optimizer} if row.runs else {}
    return {"source": row.source, **optimizer, **row.conditions}


def published(recipe: str) -> list[Row]:
    """The figures of write-up `recipe` ("e1" to "e5"), as they were published."""
    file = resources.files("ampfuse.experiments") / "published" / f"{recipe}.csv"
    lines = csv.DictReader(file.read_text().splitlines())
    return [Row(**{name: _value(text) for name, text in line.items() if text}) for line in lines]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def measured(folder: str | Path = "results") -> list[Row]:
    """The rows of all result files below `folder`.

    Runs that differ only in their seed are repeats. If a seed was run twice, the later run counts.
    """
    folder, runs = Path(folder), []
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; train something first, or pass --results")
    for path in sorted(folder.rglob("*.json")):
        if path.name.endswith(".trace.json") or path.name.startswith("."):
            continue  # written by the profiler, or being written
        try:
            run = json.loads(path.read_text("utf-8"))
            if run["format"] != FORMAT:
                raise ValueError("of another format")
            rows_of([run])  # fails if a field is missing
        except (ValueError, KeyError, TypeError) as error:
            what = f"{path} is damaged or not a result file of this version"
            raise UsageError(f"{what} ({error!r:.80}): move it away") from error
        runs.append(run)
    return rows_of(runs)


def rows_of(runs: Iterable[Result]) -> list[Row]:
    """`runs` as rows, each of the latest repeats."""
    groups: dict[str, dict[int, Result]] = {}
    for run in sorted(runs, key=lambda run: run["finished"]):
        key = repr([*(run[name] for name in SHARED), sorted(run["conditions"].items())])
        groups.setdefault(key, {})[run["seed"]] = run

    def sort_key(row: Row) -> tuple[Any, ...]:
        order = [*VARIANT_ORDER, row.variant].index(row.variant)
        line = (row.experiment, row.model, row.gpu, order, row.variant)
        return (*line, row.batch_size, row.iterations, str(row.conditions))

    return sorted((_row_of([*group.values()]) for group in groups.values()), key=sort_key)


def _row_of(runs: list[Result]) -> Row:
    """Repeats as one row."""
    last = max(reversed(runs), key=lambda run: run["finished"])
    sound = [run for run in runs if not run["diverged"]]
    diverged = [run["diverged"] for run in runs if run["diverged"]]
    timed = [run for run in sound if run["images_per_s"]]
    note = ""
    if diverged:
        some = f"{len(diverged)} of {len(runs)} " if len(runs) > 1 else ""
        note = some + ending(diverged[0])
    figures: dict[str, float | None] = {}
    for name in _FIGURES:
        counted = runs if name == "memory_mb" else sound
        values = [run[name] for run in counted if run[name] is not None]
        figures[f"{name}_mean"] = statistics.fmean(values) if values else None
        figures[f"{name}_std"] = statistics.stdev(values) if values[1:] else None
    return Row(
        source="measured",
        **{name: last[name] for name in SHARED},
        **figures,
        images_per_s_min=min((run["images_per_s_min"] for run in timed), default=None),
        images_per_s_max=max((run["images_per_s_max"] for run in timed), default=None),
        n=len(runs),
        note=note,
        memory_kind=last["memory_kind"],
        diverged=len(diverged),
        skipped_steps=statistics.fmean(run["skipped_steps"] for run in runs),
        scale=last["loss_scale"],
        date=last["finished"],
        conditions=last["conditions"],
        runs=sorted(runs, key=lambda run: run["seed"]),
    )


# ---- choosing ------------------------------------------------------------------------------------

# Flags, type and help by the column.
_FILTERS: dict[str, tuple[str, type, str]] = {
    "recipe": ("--recipe", str, "e1 to e5"),
    "model": ("--model", str, "vgg16, resnet50, ..."),
    "gpu": ("--GPU", str, "labels of the devices"),
    "variant": ("--variant --method", str, "FP32, FP16, amp, fp32, O2, ..."),
    "batch_size": ("--batch", int, "per process"),
    "iterations": ("--iteration", int, "only runs with this many iterations"),
    "epochs": ("--epochs", float, "only runs with this many epochs"),
}


def add_selection(parser: argparse.ArgumentParser, *, recipe: bool) -> None:
    """Add the flags that choose results to a command."""
    add = parser.add_argument
    for column, (flags, kind, what) in _FILTERS.items():
        if column != "recipe" or recipe:
            options = {"type": kind, "metavar": column.upper(), "help": f"{what} (default: all)"}
            add(*flags.split(), dest=column, nargs="+", default=[], **options)
    folder = "default: %(default)s"
    add("--results", type=Path, default=Path("results"), metavar="DIR", help=folder)


def chosen(rows: Sequence[Row], args: argparse.Namespace) -> list[Row]:
    """The `rows` that fit the flags of :func:`add_selection`; GPUs and variants come in the order
    given. Raises UsageError for a value without rows."""
    for column, (flags, *_) in _FILTERS.items():
        if wanted := getattr(args, column, None):
            wanted = [listed([value]) for value in wanted]  # as an error lists them: 0.25641 epochs
            there = dict.fromkeys(listed([getattr(row, column)]) for row in rows)
            if missing := [value for value in wanted if value not in there]:
                what = f"{flags.split()[0]} {listed(missing)}: no such results"
                raise UsageError(f"{what}; there are {listed(there)}")
            rows = [row for row in rows if listed([getattr(row, column)]) in wanted]
            if column in ("gpu", "variant"):
                rows.sort(key=lambda row: wanted.index(getattr(row, column)))
    return list(rows)


# ---- files ---------------------------------------------------------------------------------------


def write(path: Path, content: bytes) -> None:
    """Replace the file `path`, completely or not at all. Errors are an OSError that names it."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def file_name(text: str) -> str:
    """`text` as a part of a path on any system, such as "Tesla T4-x" for "Tesla T4/x"."""
    return re.sub(r'[<>:"/\\|?*\x00-\x1f]+', "-", text).strip(" .") or "unnamed"


def listed(values: Iterable[object]) -> str:
    shown = (f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return ", ".join(shown)
