"""Rows of result files (:func:`measured`) and of write-ups (:func:`published`).

A row is one variant at one size: a published line, or all repeats of a run. It is a dictionary with
a value or None for each of :data:`COLUMNS`; figures have a mean over the repeats and their sample
standard deviation. In measured rows, ``conditions`` has everything else that the repeats have in
common, and ``runs`` their result files. Diverged runs only count for memory.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import statistics
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ampfuse.command_line import UsageError

FORMAT = 3  # of result files and checkpoints
Result = dict[str, Any]  # a result file, see Run.result
Row = dict[str, Any]
# The script of each recipe, and the title of each script.
RECIPES = {"e1": "cifar", "e2": "cifar", "e3": "cifar", "e4": "imagenet", "e5": "mnist"}
EXPERIMENTS = {"cifar": "CIFAR", "imagenet": "ImageNet", "mnist": "MNIST", "mlp": "MLP"}
EXPERIMENTS |= {"demo": "Digits"}
VARIANT_ORDER = "FP32 fp32 tf32 FP16 fp16 amp amp-fp16 amp-bf16 O0 O1 O2 O3 O4 O5".split()

_SHARED = ("recipe", "experiment", "model", "gpu", "variant", "batch_size", "optimizer")
_SHARED += ("iterations", "epochs")
_FIGURES = ("time_s", "memory_mb", "accuracy_pct", "images_per_s", "loss_last", "loss_mean")
COLUMNS = ("source", *_SHARED, "platform")
COLUMNS += tuple(f"{name}_{what}" for name in _FIGURES for what in ("mean", "std"))
COLUMNS += ("images_per_s_min", "images_per_s_max", "n", "note")
COLUMNS += ("memory_kind", "diverged", "skipped_steps", "scale", "date")  # of own rows


def records(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """`rows` without their runs, as flat dictionaries, for a CSV or a DataFrame."""
    return [{**{name: row[name] for name in COLUMNS}, **row["conditions"]} for row in rows]


def published(recipe: str) -> list[Row]:
    """The figures of write-up `recipe` ("e1" to "e5"), as they were published."""
    file = resources.files("ampfuse.experiments") / "published" / f"{recipe}.csv"
    empty = {**dict.fromkeys(COLUMNS), "gpu": "", "note": "", "conditions": {}, "runs": []}
    lines = csv.DictReader(file.read_text().splitlines())
    return [{**empty, **{n: _value(text) for n, text in line.items() if text}} for line in lines]


def _value(text: str) -> float | str:
    try:
        return json.loads(text)
    except ValueError:
        return text


def measured(folder: str | Path = "results") -> list[Row]:
    """The rows of all result files below `folder`.

    Repeats differ in seed and number only. Of runs that do not, the one that finished last counts.
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
    groups: dict[str, dict[object, Result]] = {}
    for run in sorted(runs, key=lambda run: run["finished"]):
        key = repr([*(run[name] for name in _SHARED), sorted(run["conditions"].items())])
        groups.setdefault(key, {})[run["repeat"], run["seed"]] = run

    def place(row: Row) -> tuple[Any, ...]:
        variant = row["variant"]
        order = VARIANT_ORDER.index(variant) if variant in VARIANT_ORDER else len(VARIANT_ORDER)
        names = ("variant", "batch_size", "iterations")
        first = (row["experiment"], row["model"], row["gpu"], order)
        return (*first, *(row[name] for name in names), str(row["conditions"]))

    return sorted((_row_of([*group.values()]) for group in groups.values()), key=place)


def _row_of(runs: list[Result]) -> Row:
    """Repeats as one row."""
    last, sound = runs[-1], [run for run in runs if not run["diverged"]]
    diverged = [run["diverged"] for run in runs if run["diverged"]]
    row: Row = {"source": "measured", "platform": None, "n": len(runs), "note": ""}
    row |= {name: last[name] for name in (*_SHARED, "memory_kind", "skipped_steps", "conditions")}
    row |= {"diverged": len(diverged), "scale": last["loss_scale"], "date": last["finished"]}
    row["runs"] = sorted(runs, key=lambda run: run["repeat"])
    for name in _FIGURES:
        values = [run[name] for run in (runs if name == "memory_mb" else sound)]
        values = [value for value in values if value is not None]
        row[f"{name}_mean"] = statistics.fmean(values) if values else None
        row[f"{name}_std"] = statistics.stdev(values) if values[1:] else None
    for name, of in (("images_per_s_min", min), ("images_per_s_max", max)):
        row[name] = of((run[name] for run in sound if run["images_per_s"]), default=None)
    if diverged:
        some = f"{len(diverged)} of {len(runs)} " if len(runs) > 1 else ""
        row["note"] = f"{some}diverged in step {diverged[0]['step']}: {diverged[0]['reason']}"
    return row


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
    for field, (flags, kind, what) in _FILTERS.items():
        if field != "recipe" or recipe:
            options = {"type": kind, "metavar": field.upper(), "help": f"{what} (default: all)"}
            add(*flags.split(), dest=field, nargs="+", default=[], **options)
    folder = "default: %(default)s"
    add("--results", type=Path, default=Path("results"), metavar="DIR", help=folder)


def chosen(rows: Sequence[Row], args: argparse.Namespace) -> list[Row]:
    """The `rows` that fit the flags of :func:`add_selection`; GPUs and variants come in the order
    given. Raises UsageError for a value without rows."""
    for field, (flags, *_) in _FILTERS.items():
        if wanted := getattr(args, field, None):
            there = dict.fromkeys(row[field] for row in rows)
            if missing := [value for value in wanted if value not in there]:
                what = f"{flags.split()[0]} {listed(missing)}: no such results"
                raise UsageError(f"{what}; there are {listed(there)}")
            rows = sorted(
                (row for row in rows if row[field] in wanted),
                key=lambda row: wanted.index(row[field]) if field in ("gpu", "variant") else 0,
            )
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
