"""Result files and published figures, read as rows of one type.

:func:`measured` reads the result files below a folder, :func:`published` the figures of a write-up,
:func:`select` chooses among rows, :func:`chosen` by a command's flags, :func:`frame` makes a pandas
DataFrame of them. Every row says which of the two it is (``source``); nothing here mixes them.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampfuse.experiments.config import UsageError
from ampfuse.experiments.record import FORMAT, RunResult

if TYPE_CHECKING:
    import pandas

PUBLISHED_FILES = {
    "e1": "vgg16_cifar10_2018.csv",
    "e2": "wrn28_10_cifar10_2019.csv",
    "e3": "cifar10_gtx1070_2019.csv",
    "e4": "imagenet_resnet_2018.csv",
    "e5": "native_amp_t4_2022.csv",
}
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

    A figure is None where nobody noted it; `conditions` (see :class:`RunResult`) are empty if
    published, and `n` is None where a write-up does not say. Runs that diverged count for the
    memory alone; a row of nothing else has no length.
    """

    source: str
    recipe: str | None
    experiment: str = "cifar"
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
    runs: tuple[RunResult, ...] = dataclasses.field(default=(), repr=False)

    @property
    def arm(self) -> str:
        """The arm; of a published row the method, which is all one knows."""
        return self.conditions.get("arm", self.method)

    @property
    def diverged(self) -> bool:
        """All of it."""
        return bool(self.runs) and all(run.diverged for run in self.runs)

    @property
    def device(self) -> str:
        """The device's own name, whatever label the run was given."""
        return self.runs[0].device["name"] if self.runs else self.gpu

    def record(self) -> dict[str, Any]:
        """The row as one flat dictionary: what a CSV or a DataFrame holds."""
        flat: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _STATS:
                flat |= {
                    f"{field.name}_{of}": value and getattr(value, of) for of in ("mean", "std")
                }
            elif field.name not in ("conditions", "runs"):
                flat[field.name] = value
        if self.runs:
            last = max(self.runs, key=lambda run: run.finished)
            diverged = sum(run.diverged is not None for run in self.runs)
            flat |= {"device": self.device, **self.conditions}
            flat |= {"memory_kind": last.memory_kind, "diverged": diverged}
            flat |= {n: last.environment.get(n) for n in ("cpu", "cuda", "python", "git")}
            flat["date"] = last.finished
        return flat


_STATS = {field.name for field in dataclasses.fields(Row) if str(field.type).startswith("Stat")}


def frame(rows: Iterable[Row]) -> pandas.DataFrame:
    """`rows` as a DataFrame with the columns of :meth:`Row.record`."""
    import pandas

    return pandas.DataFrame([row.record() for row in rows])


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
            continue  # a profiler's trace; a file that is being written
        try:
            run = RunResult.read(path)
            _row_of([run]).record()  # whatever else is missing shows while the file can be named
            runs.append(run)
        except (OSError, ValueError, KeyError, TypeError) as error:
            no_key = isinstance(error, KeyError)
            reason = f"no {error.args[0]!r}" if no_key else str(error).splitlines()[0]
            skipped(f"{path}: skipped, no result file of format {FORMAT} ({reason})")
    return sorted(map(_row_of, _repeats(runs)), key=_order)


def _repeats(runs: Sequence[RunResult]) -> list[list[RunResult]]:
    """`runs` grouped to repeats of each other, the latest of those that are the same run."""
    lengths: dict[object, set[object]] = {}
    for run in runs:
        if not run.diverged:
            lengths.setdefault(_configuration(run), set()).add((run.iterations, run.epochs))
    groups: dict[object, dict[object, RunResult]] = {}
    for run in sorted(runs, key=lambda run: run.finished):
        key, length = _configuration(run), (run.iterations, run.epochs)
        if run.diverged:
            # It was to be as long as its siblings, if they agree. It does not say.
            siblings = lengths.get(key, set())
            length = next(iter(siblings)) if len(siblings) == 1 else None
        groups.setdefault((key, length), {})[run.repeat, run.seed] = run
    return [list(group.values()) for group in groups.values()]


def _configuration(run: RunResult) -> tuple[object, ...]:
    """All that repeats share but the length."""
    conditions = tuple(sorted(run.conditions.items(), key=str))
    return (run.experiment, run.model, run.gpu, run.method, run.batch_size, conditions)


def _row_of(runs: Sequence[RunResult]) -> Row:
    """`runs`, which are repeats of each other, as one row."""
    sound = [run for run in runs if not run.diverged]
    one, conditions = (sound or runs)[0], runs[0].conditions

    def figures(part: str, name: str) -> list[float]:
        values = (run.figure(part, name) for run in runs)
        return [value for value in values if value is not None]

    return Row(
        **{name: getattr(one, name) for name in ("experiment", "model", "gpu", "method")},
        source="measured",
        recipe=conditions["recipe"],
        batch_size=one.batch_size,
        iterations=one.iterations if sound else None,
        epochs=one.epochs if sound else None,
        optimizer=conditions["optimizer"],
        time_s=Stat.of(run.time_s for run in runs),
        memory_mb=Stat.of(run.memory_bytes and run.memory_bytes / 1e6 for run in runs),
        accuracy_pct=Stat.of(run.accuracy_pct for run in runs),
        images_per_s=Stat.of(figures("images_per_s", "mean")),
        images_per_s_min=min(figures("images_per_s", "min"), default=None),
        images_per_s_max=max(figures("images_per_s", "max"), default=None),
        loss_last=Stat.of(figures("train_loss", "last")),
        loss_mean=Stat.of(figures("train_loss", "mean")),
        n=len(runs),
        note=_divergence(runs),
        conditions=conditions,
        runs=tuple(sorted(runs, key=lambda run: run.repeat)),
    )


def _divergence(runs: Sequence[RunResult]) -> str:
    diverged = [run.diverged for run in runs if run.diverged]
    if not diverged:
        return ""
    what = diverged[0]
    some = "" if len(runs) == 1 else f"{len(diverged)} of {len(runs)} "
    place = f" ({what['first']})" if what.get("first") else ""
    return f"{some}diverged in step {what['step']}: {what.get('reason')}{place}"


def _order(row: Row) -> tuple[object, ...]:
    known = METHODS.index(row.method) if row.method in METHODS else len(METHODS)
    head = (row.experiment, row.model, row.gpu, known, row.method)
    is_original = row.conditions["loop"] == "original"
    return (*head, row.batch_size, row.iterations or 0, is_original, str(row.conditions))


# What a column of the files is called in a row; means and deviations make a Stat.
_NAMES = {
    "level": "method",
    "precision": "method",
    "environment": "platform",
    "workload": "model",
    "batches": "iterations",
    "val_accuracy_pct": "accuracy_pct",
    "accuracy_mean_pct": "accuracy_pct",
    "time_mean_s": "time_s",
    "memory_mean_mb": "memory_mb",
    "images_per_s_mean": "images_per_s",
    "max_memory_bytes": "memory_mb",
}
_NUMBERS = {"batch_size": int, "iterations": int, "epochs": int}
_NUMBERS |= {"images_per_s_min": float, "images_per_s_max": float}
# What the files do not repeat in every line.
_OF_ALL_LINES: dict[str, dict[str, Any]] = {
    "e1": {"model": "vgg16", "iterations": 100, "n": 5},
    "e2": {"model": "wrn28_10"},
    "e3": {},
    "e4": {"experiment": "imagenet"},
    "e5": {},
}


def published(recipe: str) -> list[Row]:
    """The figures of write-up `recipe` ("e1" to "e5"), as they were published."""
    file = resources.files("ampfuse.experiments") / "published" / PUBLISHED_FILES[recipe]
    with file.open(newline="") as lines:
        return [_published_row(recipe, line) for line in csv.DictReader(lines)]


def _published_row(recipe: str, line: Mapping[str, str]) -> Row:
    values: dict[str, Any] = {"source": "published", "recipe": recipe, **_OF_ALL_LINES[recipe]}
    for column, text in line.items():
        name = _NAMES.get(column, column)
        if "_std_" in column:  # E1's, of five repeats; it stands after the mean
            name = column.replace("_std_", "_")
            values[name] = Stat(values[name].mean, float(text), n=values["n"])
        elif name in _STATS:
            unit = 1e-6 if column.endswith("_bytes") else 1.0
            values[name] = Stat(float(text) * unit) if text else None
        elif kind := _NUMBERS.get(name):
            values[name] = kind(text) if text else None
        else:
            values[name] = text
    if recipe == "e5":
        values["model"] = values["model"].removeprefix("sample_")
        values["experiment"] = values["model"].removesuffix("_cnn")
    return Row(**values)


def select(
    rows: Sequence[Row],
    *,
    recipes: Sequence[str] = (),
    experiments: Sequence[str] = (),
    models: Sequence[str] = (),
    gpus: Sequence[str] = (),
    methods: Sequence[str] = (),
    batch_sizes: Sequence[int] = (),
    iterations: int | None = None,
    epochs: float | None = None,
) -> list[Row]:
    """The `rows` that fit; what is left empty does not restrict. Order: as given, then as it was.

    A name in `methods` is a method ("FP16") or, where no row has that method, an arm ("O2").
    Raises ResultsError if a value fits no row; the message says what is there.
    """
    chosen = list(rows)
    wishes: tuple[tuple[str, Sequence[Any], Callable[[Row], Any]], ...] = (
        ("--recipe", recipes, lambda row: row.recipe),
        ("--experiment", experiments, lambda row: row.experiment),
        ("--model", models, lambda row: row.model),
        ("--GPU", gpus, lambda row: row.gpu),
        ("--method", methods, lambda row: _method_named(row, chosen, methods)),
        ("--batch", batch_sizes, lambda row: row.batch_size),
        ("--iteration", () if iterations is None else (iterations,), lambda row: row.iterations),
        ("--epochs", () if epochs is None else (epochs,), lambda row: row.epochs),
    )
    for option, wanted, of in wishes:
        if not wanted:
            continue
        is_length = option in ("--iteration", "--epochs")
        there = list(dict.fromkeys(value for value in map(of, chosen) if value is not None))
        if missing := [value for value in wanted if value not in there]:
            there = sorted(there) if is_length else there
            raise ResultsError(
                f"{option} {listed(missing)}: no such results; there are {listed(there)}"
            )
        fitting = [row for row in chosen if of(row) in wanted]
        models_ = {row.model for row in fitting}
        # Those that diverged never got that far, and are shown beside those that did.
        chosen = [
            row
            for row in chosen
            if row in fitting or (is_length and row.diverged and row.model in models_)
        ]
    # A sort keeps the order among equals, so the last one here is the first to count.
    if methods:
        names = {id(row): _method_named(row, chosen, methods) for row in chosen}
        chosen.sort(key=lambda row: methods.index(names[id(row)]))
    if gpus:
        chosen.sort(key=lambda row: gpus.index(row.gpu))
    return chosen


EXPERIMENTS = {"cifar": "CIFAR", "imagenet": "ImageNet", "mnist": "MNIST", "mlp": "MLP"}


def add_selection(parser: argparse.ArgumentParser) -> None:
    """The flags that choose results, the same in every command that shows them."""

    def several(*names: str, to: str, **options: Any) -> None:
        parser.add_argument(*names, dest=to, nargs="+", default=[], **options)

    several("--GPU", "--gpu", to="gpus", metavar="NAME", help="their labels (default: all)")
    arms = "FP32, FP16, amp, or arms: fp32, amp-bf16, O2, ... (default: all)"
    several("--method", to="methods", metavar="NAME", help=arms)
    several("--batch", to="batch_sizes", type=int, metavar="N", help="default: all")
    some = {"choices": EXPERIMENTS, "metavar": "NAME", "help": ", ".join(EXPERIMENTS)}
    several("--experiment", to="experiments", **some)
    several("--model", to="models", metavar="NAME", help="vgg16, resnet50, ... (default: all)")
    length = parser.add_mutually_exclusive_group()
    alike = "runs of N iterations only; runs of different length do not go into one line"
    names = ("--iteration", "--iterations")
    length.add_argument(*names, type=int, dest="iterations", metavar="N", help=alike)
    alike = "runs of N epochs only, however many iterations these are"
    length.add_argument("--epochs", type=float, metavar="N", help=alike)
    add = parser.add_argument
    add("--results", type=Path, default=Path("results"), metavar="DIR", help="default: %(default)s")


def chosen(rows: Sequence[Row], args: argparse.Namespace, recipes: Sequence[str]) -> list[Row]:
    """Those of `rows` that are of `recipes` and fit the flags of :func:`add_selection`."""
    wishes = ("experiments", "models", "gpus", "methods", "batch_sizes", "iterations", "epochs")
    return select(rows, recipes=recipes, **{name: getattr(args, name) for name in wishes})


def _method_named(row: Row, rows: Sequence[Row], wanted: Sequence[str]) -> str:
    """The name of `row` among those `wanted`: its method or, if no row has that, its arm."""
    names_a_method = row.arm in {other.method for other in rows}
    by_arm = row.method not in wanted and row.arm in wanted and not names_a_method
    return row.arm if by_arm else row.method


def listed(values: Iterable[object]) -> str:
    shown = (f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return ", ".join(shown)
