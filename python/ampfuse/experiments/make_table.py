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
import csv
import functools
import io
import math
import operator
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ampfuse.command_line import check_writable, run_alone
from ampfuse.experiments import results
from ampfuse.experiments.results import RECIPES, ResultsError, Row, Stat
from ampfuse.files import atomic

_SCRIPTS = {"e1": "cifar", "e2": "cifar", "e3": "cifar", "e4": "imagenet", "e5": "mnist"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("recipe", choices=RECIPES, help="which table")
    results.add_selection(parser, recipe=False)
    rows = "write the own rows there too, with device, versions, date, means and deviations"
    add("--csv", type=Path, metavar="FILE", help=rows)
    add("--no-published", action="store_true", help="own rows only")


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Do what `args` say and return the exit status."""

    def warn(line: str) -> None:
        print(f"{parser.prog}: {line}", file=sys.stderr)

    if args.csv:
        check_writable("--csv", args.csv.parent)
    own = _own_rows(args, warn)
    theirs = [] if args.no_published else results.published(args.recipe)
    if args.csv:
        write_csv(args.csv, own)
    print(table([*theirs, *own]))
    return 0


def _own_rows(args: argparse.Namespace, warn: Callable[[str], None]) -> list[Row]:
    """The measured rows of the recipe. None is an error only where nothing else was asked for."""
    how = f"python -m ampfuse.experiments.{_SCRIPTS[args.recipe]} --recipe {args.recipe}"
    wanted = args.results.is_dir() or str(args.results) != "results"
    everything = results.measured(args.results, skipped=warn) if wanted else []
    recipes = sorted({row.recipe for row in everything if row.recipe})
    if args.recipe in recipes:
        return results.chosen(everything, args, recipes=[args.recipe])
    there = f", only of {', '.join(recipes)}" if recipes else ""
    reason = f"{args.results}: no results of {args.recipe}{there}"
    if args.csv or args.no_published:
        raise ResultsError(f"{reason}; train first: {how}")
    warn(f"{reason}; published rows only. To measure: {how}")
    return []


def table(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """`rows` as a Markdown table of `columns`, or of all that say something, and what they mean."""
    columns = columns or _PUBLISHED
    found = {name: [_escaped(CELLS[name](row)) for row in rows] for name in columns}
    names = [name for name in columns if any(found[name]) or name == "note"]
    parts = []
    for name in names:
        width = max(map(len, (name, *found[name])))
        parts.append([text.ljust(width) for text in (name, "-" * width, *found[name])])
    text = "\n".join("| " + " | ".join(line) + " |" for line in zip(*parts, strict=True))
    return "\n\n".join([text, *_explanation(rows)])


def _escaped(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _explanation(rows: Sequence[Row]) -> list[str]:
    own = [row for row in rows if row.runs]
    if not own:
        return []
    kinds = sorted({run["memory_kind"] for row in own for run in row.runs})
    versions = [
        f"{name} {version}"
        for name in ("torch", "ampfuse")
        for version in sorted({str(row.conditions.get(name)) for row in own})
    ]
    dates = sorted({run["finished"][:10] for row in own for run in row.runs})
    return [
        "Measured here: time of training, without warm-up and evaluation; memory by "
        f"{' or '.join(kinds)}, 1 MB being 10^6 bytes; ± is the sample standard deviation of n "
        f"repeats. {', '.join(versions)}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}."
    ]


def _note(row: Row) -> str:
    """Why figures are missing, and all that sets a measured row apart from the published ones."""
    if row.source == "published":
        return row.note
    of, notes = row.conditions, []
    if row.recipe and not is_published_gpu(row.device, row.recipe):
        notes.append("re-enactment, on another device than the published")
    notes += [row.note] if row.note else []
    notes += [f"{of['data']} data"] if of["data"] in ("synthetic", "digits") else []
    notes += ["the published loop"] if of["loop"] == "original" else []
    notes += ["graph"] if of.get("graph") else []
    notes += [f"{of['world_size']} processes"] if of["world_size"] > 1 else []
    return "; ".join(notes)


def is_published_gpu(device: str, recipe: str) -> bool:
    """Whether `device`, by its own name, is of a model that `recipe` was published on.

    "Tesla V100-SXM2-16GB" is a V100; "NVIDIA GeForce GTX 1070 Ti" is no GTX 1070.
    """
    for name in {row.gpu for row in results.published(recipe)} - {""}:
        pattern = r"\b" + r"[\s-]+".join(map(re.escape, name.split())) + r"\b(?![\s-]*(ti|super)\b)"
        if re.search(pattern, device, re.IGNORECASE):
            return True
    return False


def _number(value: float | Stat, places: int = 6) -> str:
    """At most so many places behind the point, without zeros at the end: 80.2, 3437. Of a Stat the
    mean, and the deviation where there is one."""
    if isinstance(value, Stat):
        spread = "" if value.std is None else f" ± {_number(value.std, places)}"
        return _number(value.mean, places) + spread
    return f"{round(value, places):f}".rstrip("0").rstrip(".")


def _shown(of: Callable[[Row], Any]) -> Callable[[Row], str]:
    """A cell with what `of` says of the row: a word, or a number: as published, or to four
    figures."""

    def cell(row: Row) -> str:
        value = of(row)
        if value is None or isinstance(value, str):
            return value or ""
        mean = value.mean if isinstance(value, Stat) else value
        measured = row.source == "measured" and mean and not isinstance(value, int)
        return _number(value, max(0, 3 - math.floor(math.log10(abs(mean)))) if measured else 6)

    return cell


def _per_step(row: Row) -> Stat | None:
    if row.time_s is None or not row.iterations:
        return None
    each = 1e3 / row.iterations
    return Stat(each * row.time_s.mean, row.time_s.std and each * row.time_s.std, row.time_s.n)


_NAMES = {
    **{"model": "model", "method": "method", "optimizer": "optimizer", "batch size": "batch_size"},
    **{"iterations": "iterations", "epochs": "epochs", "time, s": "time_s"},
    **{"images/s": "images_per_s", "min": "images_per_s_min", "max": "images_per_s_max"},
    **{"memory, MB": "memory_mb", "accuracy, %": "accuracy_pct"},
    **{"loss last": "loss_last", "loss mean": "loss_mean", "n": "n"},
}
# The columns, and what stands in them.
CELLS: dict[str, Callable[[Row], str]] = {
    "source": lambda row: "published" if row.source == "published" else "measured here",
    "environment": lambda row: row.platform,
    "GPU": lambda row: row.gpu if row.gpu == row.device else f"{row.gpu} ({row.device})",
    **{header: _shown(operator.attrgetter(name)) for header, name in _NAMES.items()},
    "note": _note,
    # Of own runs.
    "step, ms": _shown(_per_step),
    "skipped": lambda row: _number(statistics.fmean(run["skipped_steps"] for run in row.runs), 1),
    "scale": lambda row: f"{row.runs[-1]['loss_scale']:,.0f}",
    "outcome": lambda row: row.note,
}
_PUBLISHED = list(CELLS)[:-4]


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """One line per row, all that :meth:`Row.record` knows; columns in its order."""
    records = [row.record() for row in rows]
    text = io.StringIO()
    names = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for record in records:
        words = {n: " ".join(v.split()) for n, v in record.items() if isinstance(v, str)}
        writer.writerow(record | words)
    with atomic(path) as file:
        file.write(text.getvalue().encode())


main = functools.partial(
    run_alone, sys.modules[__name__], prog="python -m ampfuse.experiments.make_table"
)

if __name__ == "__main__":
    sys.exit(main(None))
