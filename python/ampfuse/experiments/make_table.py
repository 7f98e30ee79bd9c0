"""Print a published table as Markdown, with own rows (runs of that recipe below --results) beside
the published ones. Every row says whose it is.

  make_table e1       VGG16 on CIFAR-10: accuracy, time, memory
  make_table e2       Wide-ResNet-28-10 on CIFAR-10 at O0 to O3
  make_table e3       SE-ResNeXt50 and DenseNet161 on CIFAR-10
  make_table e4       ResNets on ImageNet: images per second, loss
  make_table e5       a perceptron and a CNN for MNIST: time, memory
"""

# The module's docstring is the text of `make_table --help`. Nothing heavy is imported up here.
from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ampfuse.command_line import check_writable, run_alone
from ampfuse.experiments.results import (
    PUBLISHED_FILES,
    ResultsError,
    Row,
    Stat,
    add_selection,
    chosen,
    measured,
    published,
)
from ampfuse.files import atomic

_TRAINERS = {"e1": "cifar", "e2": "cifar", "e3": "cifar", "e4": "imagenet", "e5": "mnist"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", choices=sorted(PUBLISHED_FILES), help="which table")
    add_selection(parser)
    rows = "write the own rows there too, with hardware, versions, date, means and deviations"
    add("--csv", type=Path, metavar="FILE", help=rows)
    add("--no-published", action="store_true", help="own rows only")


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Do what `args` say and return the exit status: 2, after a line of why, if that cannot be."""

    def warn(line: str) -> None:
        print(f"{parser.prog}: {line}", file=sys.stderr)

    if args.csv:
        check_writable("--csv", args.csv.parent)
    own = _own_rows(args, warn)
    theirs = [] if args.no_published else published(args.recipe)
    if args.csv:
        _write_csv(args.csv, own)
    print(table(args.recipe, [*theirs, *own]))
    return 0


def _own_rows(args: argparse.Namespace, warn: Callable[[str], None]) -> list[Row]:
    """The measured rows of the recipe. None is an error only where nothing else was asked for."""
    how = f"python -m ampfuse.experiments.{_TRAINERS[args.recipe]} --recipe {args.recipe}"
    wanted = args.results.is_dir() or str(args.results) != "results"
    everything = measured(args.results, skipped=warn) if wanted else []
    recipes = sorted({row.recipe for row in everything if row.recipe})
    if args.recipe in recipes:
        return chosen(everything, args, [args.recipe])
    there = f", only of {', '.join(recipes)}" if recipes else ""
    reason = f"{args.results}: no results of {args.recipe}{there}"
    if args.csv or args.no_published:
        raise ResultsError(f"{reason}; train first: {how}")
    warn(f"{reason}; published rows only. To measure: {how}")
    return []


def table(recipe: str, rows: Sequence[Row]) -> str:
    """`rows` as a Markdown table with the columns of the published one, and what they mean."""
    columns = ["source", *_COLUMNS[recipe].split("|"), "n", "note"]
    cells = [[_CELLS[column](row) for column in columns] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells]
    text = "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)
    return "\n\n".join([text, *_explanation(rows)])


def _escaped(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _explanation(rows: Sequence[Row]) -> list[str]:
    own = [run for row in rows for run in row.runs]
    if not own:
        return []
    kinds = sorted({run.memory_kind for run in own if run.memory_kind})
    versions = [
        f"{name} {version}"
        for name in ("torch", "ampfuse")
        for version in sorted({str(run.environment.get(name)) for run in own})
    ]
    dates = sorted({run.finished[:10] for run in own})
    return [
        "Measured here: time of training, without warm-up and evaluation; memory by "
        f"{' or '.join(kinds)}, 1 MB being 10^6 bytes; ± is the sample standard deviation of n "
        f"repeats. {', '.join(versions)}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."
    ]


def _gpu(row: Row) -> str:
    """The label, and the device's own name where that says more."""
    return row.gpu if row.gpu == row.device else f"{row.gpu} ({row.device})"


def _note(row: Row) -> str:
    """Why figures are missing, and all that sets a measured row apart from the published ones."""
    if row.source == "published":
        return row.note
    conditions = row.conditions
    notes = []
    if not is_published_gpu(row.device, str(row.recipe)):
        notes.append("re-enactment, on another device than the published")
    notes += [row.note] if row.note else []
    if conditions["data"] in ("synthetic", "digits"):
        notes.append(f"{conditions['data']} data")
    if conditions["loop"] == "original":
        notes.append("the published loop")
    notes += [name for name in ("graph", "compile") if conditions.get(name)]
    if conditions["world_size"] > 1:
        notes.append(f"{conditions['world_size']} processes")
    if row.recipe in ("e2", "e3", "e5") and row.epochs is not None and row.epochs < 1:
        notes.append(f"{row.iterations} iterations")
    return "; ".join(notes)


def is_published_gpu(device: str, recipe: str) -> bool:
    """Whether `device`, by its own name, is of a model that `recipe` was published on.

    "Tesla V100-SXM2-16GB" is a V100; "NVIDIA GeForce GTX 1070 Ti" is no GTX 1070.
    """
    for name in {row.gpu for row in published(recipe)} - {""}:
        pattern = r"\b" + r"[\s-]+".join(map(re.escape, name.split())) + r"\b(?![\s-]*(ti|super)\b)"
        if re.search(pattern, device, re.IGNORECASE):
            return True
    return False


def _plain(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _rounded(value: float | Stat | None, digits: int) -> str:
    """At most so many digits behind the point, as in the published tables: 80.2, 3437.

    Of a Stat the mean, and the deviation where there is one.
    """
    if value is None:
        return ""
    if isinstance(value, Stat):
        spread = "" if value.std is None else f" ± {_rounded(value.std, digits)}"
        return _rounded(value.mean, digits) + spread
    return f"{round(value, digits):f}".rstrip("0").rstrip(".")


def _shown(name: str, digits: int | None = None) -> Callable[[Row], str]:
    """A cell with a field of the row, rounded to so many `digits`."""
    if digits is None:
        return lambda row: _plain(getattr(row, name))
    return lambda row: _rounded(getattr(row, name), digits)


# Headers, and what stands below them.
_CELLS: dict[str, Callable[[Row], str]] = {
    "source": lambda row: "published" if row.source == "published" else "measured here",
    "platform": _shown("platform"),
    "environment": lambda row: row.platform or f"pytorch-{row.conditions['torch']}",
    "GPU": _gpu,
    **dict.fromkeys(("model", "workload"), _shown("model")),
    **dict.fromkeys(("method", "level", "precision"), _shown("method")),
    "optimizer": _shown("optimizer"),
    "batch size": _shown("batch_size"),
    **dict.fromkeys(("batches", "iterations"), _shown("iterations")),
    "epochs": _shown("epochs"),
    **dict.fromkeys(("accuracy, %", "val accuracy, %"), _shown("accuracy_pct", 2)),
    "time, s": lambda row: _rounded(row.time_s, 3 if row.recipe == "e5" else 2),
    "time per epoch, s": lambda row: _rounded(
        row.time_s.mean / row.epochs if row.time_s and row.epochs else None, 2
    ),
    "memory, MB": _shown("memory_mb", 2),
    "memory, bytes": lambda row: _rounded(row.memory_mb and row.memory_mb.mean * 1e6, 0),
    "images/s mean": _shown("images_per_s", 3),
    "min": _shown("images_per_s_min", 3),
    "max": _shown("images_per_s_max", 3),
    "loss last": _shown("loss_last", 4),
    "loss mean": _shown("loss_mean", 4),
    "n": _shown("n"),
    "note": _note,
}
# The columns of each table, between the first, source, and the last two, n and note.
_COLUMNS = {
    "e1": "GPU|method|batch size|accuracy, %|time, s|memory, MB|iterations",
    "e2": "platform|GPU|level|batch size|epochs|time, s|memory, MB|val accuracy, %",
    "e3": "model|GPU|level|optimizer|batch size|epochs|time, s|time per epoch, s|memory, MB"
    "|val accuracy, %",
    "e4": "environment|GPU|model|precision|batch size|batches|images/s mean|min|max|loss last"
    "|loss mean",
    "e5": "workload|GPU|method|batch size|epochs|time, s|memory, bytes",
}


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    """One line per row, all that :meth:`Row.record` knows; columns in its order."""
    import pandas

    # As objects: whole numbers stay whole beside empty cells.
    table = pandas.DataFrame([row.record() for row in rows], dtype=object)
    table = table.map(lambda value: " ".join(value.split()) if isinstance(value, str) else value)
    with atomic(path) as file:
        table.to_csv(file, index=False, lineterminator="\n")


def main(argv: list[str] | None = None, prog: str | None = None) -> int:
    """Run the command line `argv` (default: ``sys.argv``) and return the exit status."""
    prog = prog or "python -m ampfuse.experiments.make_table"
    return run_alone(sys.modules[__name__], argv, prog)


if __name__ == "__main__":
    sys.exit(main())
