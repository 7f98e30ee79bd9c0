"""Result files and published figures, read as rows of one type.

:func:`measured` reads the result files below a folder, :func:`published` the figures of a write-up,
:func:`select` chooses among rows, :func:`chosen` by a command's flags, :func:`frame` makes a pandas
DataFrame of them. Every row says which of the two it is (``source``); nothing here mixes them.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import re
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampfuse.command_line import UsageError

if TYPE_CHECKING:
    import pandas

FORMAT = 2  # of result files and checkpoints
Result = dict[str, Any]  # a result file; its fields are those of Run.result
RECIPES = ("e1", "e2", "e3", "e4", "e5")
EXPERIMENTS = {"cifar": "CIFAR", "imagenet": "ImageNet", "mnist": "MNIST", "mlp": "MLP"}
EXPERIMENTS |= {"demo": "Digits"}
# The order of lines and rows: full precision first. E1's names stand beside their arms.
METHODS = ("FP32", "fp32", "tf32", "FP16", "fp16", "amp", "amp-fp16", "amp-bf16")
METHODS += ("O0", "O1", "O2", "O3", "O4", "O5")


class ResultsError(UsageError):
    """There are no results of the kind asked for, or they cannot be shown together."""


@dataclasses.dataclass(frozen=True)
class Stat:
    """`n` repeats of a figure: mean and sample standard deviation (None if nobody knows it)."""

    mean: float
    std: float | None = None
    n: int = 1

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Stat | None:
        """Of `values` without the Nones; None if nothing is left."""
        there = [value for value in values if value is not None]
        if not there:
            return None
        std = statistics.stdev(there) if len(there) > 1 else None
        return cls(statistics.fmean(there), std, len(there))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration: a published line, or all repeats of a measured one.

    A figure is None where nobody noted it; `conditions`, all that repeats have in common, are empty
    if published, and `n` is None where a write-up does not say. Runs that diverged count for the
    memory alone; their length is what it was to be.
    """

    source: str
    recipe: str | None = None
    experiment: str
    model: str
    gpu: str = ""
    method: str
    batch_size: int | None = None
    iterations: int | None = None
    epochs: float | None = None
    optimizer: str = ""
    platform: str = ""
    time_s: Stat | None = None
    memory_mb: Stat | None = None
    accuracy_pct: Stat | None = None
    images_per_s: Stat | None = None
    images_per_s_min: float | None = None
    images_per_s_max: float | None = None
    loss_last: Stat | None = None
    loss_mean: Stat | None = None
    n: int | None = None
    note: str = ""
    conditions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    runs: tuple[Result, ...] = dataclasses.field(default=(), repr=False)

    @property
    def arm(self) -> str:
        """The arm; of a published row the method, which is all one knows."""
        return self.conditions.get("arm", self.method)

    @property
    def diverged(self) -> bool:
        """All of it."""
        return bool(self.runs) and all(run["diverged"] for run in self.runs)

    @property
    def device(self) -> str:
        """The device's own name, whatever label the run was given."""
        return self.conditions.get("device", self.gpu)

    def record(self) -> dict[str, Any]:
        """The row as one flat dictionary: what a CSV or a DataFrame holds."""
        flat: dict[str, Any] = {}
        for name, kind in _TYPES.items():
            value = getattr(self, name)
            if kind is Stat:
                flat |= {f"{name}_mean": value and value.mean, f"{name}_std": value and value.std}
            else:
                flat[name] = value
        if self.runs:
            last = max(self.runs, key=lambda run: run["finished"])
            diverged = sum(run["diverged"] is not None for run in self.runs)
            flat |= {**self.conditions, "memory_kind": last["memory_kind"], "diverged": diverged}
            flat |= {"skipped_steps": last["skipped_steps"], "scale": last["loss_scale"]}
            flat["date"] = last["finished"]
        return flat

    @classmethod
    def of_record(cls, flat: Mapping[str, str]) -> Row:
        """The published row that a CSV holds, as :meth:`record` has it."""
        values: dict[str, Any] = {n: kind(flat[n]) for n, kind in _TYPES.items() if flat.get(n)}
        for name in STATS:
            if mean := flat.get(f"{name}_mean"):
                std = flat.get(f"{name}_std")
                values[name] = Stat(float(mean), float(std) if std else None, values.get("n", 1))
        return cls(**values)


# What a CSV holds of a row, in the order of its columns.
_KINDS = {"str": str, "int": int, "float": float, "Stat": Stat}
_TYPES: dict[str, type] = {
    field.name: _KINDS[str(field.type).removesuffix(" | None")]
    for field in dataclasses.fields(Row)
    if field.name not in ("conditions", "runs")
}
STATS = [name for name, kind in _TYPES.items() if kind is Stat]


def frame(rows: Iterable[Row]) -> pandas.DataFrame:
    """`rows` as a DataFrame with the columns of :meth:`Row.record`."""
    import pandas

    return pandas.DataFrame([row.record() for row in rows])


def published(recipe: str) -> list[Row]:
    """The figures of write-up `recipe` ("e1" to "e5"), as they were published."""
    file = resources.files("ampfuse.experiments") / "published" / f"{recipe}.csv"
    with file.open(newline="") as lines:
        return [Row.of_record(line) for line in csv.DictReader(lines)]


def measured(
    folder: str | Path = "results", skipped: Callable[[str], object] = warnings.warn
) -> list[Row]:
    """The rows of all result files below `folder`, repeats taken together.

    Repeats have everything but seed and number in common. Of runs that have those in common too,
    the one that finished last counts: a command given twice is no second sample. `skipped` is
    called with a line of text for every file that cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ResultsError(f"{folder}: no such folder; train something first, or give --results")
    runs = []
    for path in sorted(folder.rglob("*.json")):
        if path.name.endswith(".trace.json") or path.name.startswith("."):
            continue  # a profiler's; one that is being written
        try:
            run = json.loads(path.read_text("utf-8"), parse_constant=_no_constant)
            if run["format"] != FORMAT:
                raise ValueError(f'"format" is not {FORMAT}')
            _order(_row_of([run]))  # whatever is missing shows while the file can be named
            _row_of([run]).record()
            runs.append(run)
        except (OSError, ValueError, KeyError, TypeError) as error:
            no_key = isinstance(error, KeyError)
            reason = f"no {error.args[0]!r}" if no_key else str(error).splitlines()[0]
            skipped(f"{path}: skipped, no result file of format {FORMAT} ({reason})")
    return rows_of(runs)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def rows_of(runs: Iterable[Result]) -> list[Row]:
    """`runs` as rows: grouped to repeats of each other, the latest of those that are the same."""
    groups: dict[str, dict[object, Result]] = {}
    for run in sorted(runs, key=lambda run: run["finished"]):
        groups.setdefault(_configuration(run), {})[run["repeat"], run["seed"]] = run
    return sorted((_row_of(list(group.values())) for group in groups.values()), key=_order)


_SHARED = ("recipe", "experiment", "model", "gpu", "method", "batch_size", "optimizer")
_SHARED += ("iterations", "epochs")


def _configuration(run: Result) -> str:
    """All that repeats share."""
    return repr([*(run[name] for name in _SHARED), sorted(run["conditions"].items())])


def _row_of(runs: Sequence[Result]) -> Row:
    """`runs`, which are repeats of each other, as one row."""
    sound = [run for run in runs if not run["diverged"]]
    timed = [run for run in sound if run["images_per_s"]]
    diverged = [run["diverged"] for run in runs if run["diverged"]]
    some = f"{len(diverged)} of {len(runs)} " if len(runs) > 1 else ""
    why = (
        f"{some}diverged in step {diverged[0]['step']}: {diverged[0]['reason']}" if diverged else ""
    )
    return Row(
        **{name: runs[0][name] for name in _SHARED},
        source="measured",
        **{n: Stat.of(run[n] for run in (runs if n == "memory_mb" else sound)) for n in STATS},
        images_per_s_min=min((run["images_per_s_min"] for run in timed), default=None),
        images_per_s_max=max((run["images_per_s_max"] for run in timed), default=None),
        n=len(runs),
        note=why,
        conditions=runs[0]["conditions"],
        runs=tuple(sorted(runs, key=lambda run: run["repeat"])),
    )


def _order(row: Row) -> tuple[object, ...]:
    known = METHODS.index(row.method) if row.method in METHODS else len(METHODS)
    head = (row.experiment, row.model, row.gpu, known, row.method, row.batch_size)
    is_original = row.conditions["loop"] == "original"
    return (*head, row.iterations or 0, is_original, str(row.conditions))


# ---- choosing ------------------------------------------------------------------------------------

# By the name of the wish: the flag, the row's field, its type, and the flag's help.
_WISHES: dict[str, tuple[str, str, type, str]] = {
    "recipes": ("--recipe", "recipe", str, "e1 to e5"),
    "experiments": ("--experiment", "experiment", str, ", ".join(EXPERIMENTS)),
    "models": ("--model", "model", str, "vgg16, resnet50, ..."),
    "gpus": ("--GPU", "gpu", str, "their labels"),
    "methods": ("--method", "method", str, "FP32, FP16, amp, fp32, O2, ..."),
    "batch_sizes": ("--batch", "batch_size", int, "of each process"),
    "iterations": ("--iteration", "iterations", int, "runs of so many iterations only"),
    "epochs": ("--epochs", "epochs", float, "runs of so many epochs only"),
}


def select(rows: Sequence[Row], **wishes: Sequence[Any]) -> list[Row]:
    """The `rows` that fit `wishes`: lists named recipes, experiments, models, gpus, methods,
    batch_sizes, iterations, epochs; an empty one does not restrict. Order: gpus and methods as
    given, then as it was. Raises ResultsError if a value fits no row; the message says what is
    there."""
    chosen = list(rows)
    for name, (flag, field, _, _) in _WISHES.items():
        wanted = wishes.get(name) or ()
        there = list(dict.fromkeys(getattr(row, field) for row in chosen))
        if missing := [wish for wish in wanted if wish not in there]:
            shown = listed(one for one in there if one is not None)
            raise ResultsError(f"{flag} {listed(missing)}: no such results; there are {shown}")
        chosen = [row for row in chosen if not wanted or getattr(row, field) in wanted]
    for name in ("methods", "gpus"):
        if wanted := wishes.get(name):
            chosen.sort(key=lambda row: wanted.index(getattr(row, _WISHES[name][1])))
    return chosen


def add_selection(parser: argparse.ArgumentParser, *, recipe: bool) -> None:
    """The flags that choose results, the same in every command that shows them; with that of
    recipes, or without."""
    for name, (flag, field, kind, what) in _WISHES.items():
        choices = {"recipes": RECIPES, "experiments": tuple(EXPERIMENTS)}.get(name)
        if name != "recipes" or recipe:
            options = {"type": kind, "choices": choices, "metavar": field.upper(), "nargs": "+"}
            options["help"] = f"{what} (default: all)"
            parser.add_argument(flag, dest=name, default=[], **options)
    folder = {"type": Path, "default": Path("results"), "metavar": "DIR"}
    parser.add_argument("--results", **folder, help="default: %(default)s")


def chosen(rows: Sequence[Row], args: argparse.Namespace, **more: Sequence[str]) -> list[Row]:
    """Those of `rows` that fit the flags of :func:`add_selection`."""
    return select(rows, **{n: getattr(args, n) for n in _WISHES if hasattr(args, n)} | more)


def file_name(text: str) -> str:
    """`text` as a part of a path on any system: "Tesla T4/x" becomes "Tesla T4-x"."""
    return re.sub(r'[<>:"/\\|?*\x00-\x1f]+', "-", text).strip(" .") or "unnamed"


def listed(values: Iterable[object]) -> str:
    shown = (f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return ", ".join(shown)
