"""Result files (:func:`measured`) and figures of write-ups (:func:`published`), read as rows of one
form. Every row says which of the two it is (``source``); nothing here mixes them.

A row is one configuration: a published line, or all repeats of a measured one. It is a dictionary
with a value, or None, for each of :data:`COLUMNS`; figures have a mean over the repeats and their
sample standard deviation. Of own rows, ``conditions`` holds all else that repeats have in common
and ``runs`` their result files; runs that diverged count for the memory alone, and their length is
what it was to be.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampfuse.command_line import UsageError

if TYPE_CHECKING:
    import pandas

FORMAT = 2  # of result files and checkpoints
Result = dict[str, Any]  # a result file; its fields are those of Run.result
Row = dict[str, Any]
# With the script of each.
RECIPES = {"e1": "cifar", "e2": "cifar", "e3": "cifar", "e4": "imagenet", "e5": "mnist"}
EXPERIMENTS = {"cifar": "CIFAR", "imagenet": "ImageNet", "mnist": "MNIST", "mlp": "MLP"}
EXPERIMENTS |= {"demo": "Digits"}
# The order of lines and rows: full precision first. E1's names stand beside their arms.
METHODS = ("FP32", "fp32", "tf32", "FP16", "fp16", "amp", "amp-fp16", "amp-bf16")
METHODS += ("O0", "O1", "O2", "O3", "O4", "O5")

_SHARED = ("recipe", "experiment", "model", "gpu", "method", "batch_size", "optimizer")
_SHARED += ("iterations", "epochs")
_FIGURES = ("time_s", "memory_mb", "accuracy_pct", "images_per_s", "loss_last", "loss_mean")
COLUMNS = ("source", *_SHARED, "platform")
COLUMNS += tuple(f"{name}_{what}" for name in _FIGURES for what in ("mean", "std"))
COLUMNS += ("images_per_s_min", "images_per_s_max", "n", "note")
COLUMNS += ("memory_kind", "diverged", "skipped_steps", "scale", "date")  # of own rows


def records(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """`rows` without their runs, as flat dictionaries: what a CSV or a DataFrame holds."""
    return [{**{name: row[name] for name in COLUMNS}, **row["conditions"]} for row in rows]


def frame(rows: Iterable[Row]) -> pandas.DataFrame:
    """`rows` as a DataFrame."""
    import pandas

    return pandas.DataFrame(records(rows))


def published(recipe: str) -> list[Row]:
    """The figures of write-up `recipe` ("e1" to "e5"), as they were published."""
    file = resources.files("ampfuse.experiments") / "published" / f"{recipe}.csv"
    empty: Row = {**dict.fromkeys(COLUMNS), "gpu": "", "conditions": {}, "runs": []}
    rows = []
    for line in csv.DictReader(file.read_text().splitlines()):
        rows.append(dict(empty))
        for name, text in line.items():
            if text:
                rows[-1][name] = text
                with contextlib.suppress(ValueError):
                    rows[-1][name] = json.loads(text)
    return rows


def measured(folder: str | Path = "results") -> list[Row]:
    """The rows of all result files below `folder`, repeats taken together.

    Repeats have everything but seed and number in common. Of runs that have those in common too,
    the one that finished last counts: a command given twice is not a second sample.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder; train something first, or pass --results")
    runs = []
    for path in sorted(folder.rglob("*.json")):
        if path.name.endswith(".trace.json") or path.name.startswith("."):
            continue  # a profiler's; one that is being written
        try:
            run = json.loads(path.read_text("utf-8"))
            if run["format"] != FORMAT:
                raise ValueError("of another format")
            rows_of([run])  # whatever is missing shows while the file can be named
        except (ValueError, KeyError, TypeError) as error:
            what = f"{path} is damaged or not a result file of this version"
            raise UsageError(f"{what} ({error!r:.80}): move it away") from error
        runs.append(run)
    return rows_of(runs)


def rows_of(runs: Iterable[Result]) -> list[Row]:
    """`runs` as rows: grouped to repeats of each other, the latest of those that are the same."""
    groups: dict[str, dict[object, Result]] = {}
    for run in sorted(runs, key=lambda run: run["finished"]):
        key = repr([*(run[name] for name in _SHARED), sorted(run["conditions"].items())])
        groups.setdefault(key, {})[run["repeat"], run["seed"]] = run
    return sorted((_row_of([*group.values()]) for group in groups.values()), key=_order)


def _row_of(runs: list[Result]) -> Row:
    """`runs`, which are repeats of each other, as one row."""
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


def _order(row: Row) -> tuple[object, ...]:
    method = row["method"]
    known = METHODS.index(method) if method in METHODS else len(METHODS)
    head = (row["experiment"], row["model"], row["gpu"], known, method, row["batch_size"])
    return (*head, row["iterations"] or 0, str(row["conditions"]))


# ---- choosing ------------------------------------------------------------------------------------

# By the row's field: the flag, its type, and its help.
_WISHES: dict[str, tuple[str, type, str]] = {
    "recipe": ("--recipe", str, "e1 to e5"),
    "experiment": ("--experiment", str, ", ".join(EXPERIMENTS)),
    "model": ("--model", str, "vgg16, resnet50, ..."),
    "gpu": ("--GPU", str, "labels of the devices"),
    "method": ("--method", str, "FP32, FP16, amp, fp32, O2, ..."),
    "batch_size": ("--batch", int, "per process"),
    "iterations": ("--iteration", int, "only runs with this many iterations"),
    "epochs": ("--epochs", float, "only runs with this many epochs"),
}


def select(rows: Sequence[Row], **wishes: Sequence[Any]) -> list[Row]:
    """The `rows` that fit `wishes`: lists by the name of a column of :data:`_WISHES`; an empty one
    does not restrict. Order: GPUs and methods as given, then as it was. Raises UsageError if a
    value fits no row; the message says what is there."""
    found = list(rows)
    for field, wanted in wishes.items():
        there = dict.fromkeys(row[field] for row in found)
        if missing := [wish for wish in wanted if wish not in there]:
            shown = listed(one for one in there if one is not None)
            flag = _WISHES[field][0]
            raise UsageError(f"{flag} {listed(missing)}: no such results; there are {shown}")
        found = [row for row in found if not wanted or row[field] in wanted]
    for field in ("method", "gpu"):
        if wanted := wishes.get(field):
            found.sort(key=lambda row: wanted.index(row[field]))
    return found


def add_selection(parser: argparse.ArgumentParser, *, recipe: bool) -> None:
    """The flags that choose results, the same in every command that shows them."""
    for field, (flag, kind, what) in _WISHES.items():
        if field != "recipe" or recipe:
            options = {"type": kind, "metavar": field.upper(), "help": f"{what} (default: all)"}
            parser.add_argument(flag, dest=field, nargs="+", default=[], **options)
    folder = {"type": Path, "default": Path("results"), "metavar": "DIR"}
    parser.add_argument("--results", **folder, help="default: %(default)s")


def chosen(rows: Sequence[Row], args: argparse.Namespace) -> list[Row]:
    """Those of `rows` that fit the flags of :func:`add_selection`."""
    return select(rows, **{field: getattr(args, field, []) for field in _WISHES})


def file_name(text: str) -> str:
    """`text` as a part of a path on any system: "Tesla T4/x" becomes "Tesla T4-x"."""
    return re.sub(r'[<>:"/\\|?*\x00-\x1f]+', "-", text).strip(" .") or "unnamed"


def listed(values: Iterable[object]) -> str:
    shown = (f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return ", ".join(shown)
