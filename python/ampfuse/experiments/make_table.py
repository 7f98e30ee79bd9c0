"""Print a published table as Markdown, with own rows (runs of that recipe below --results) beside
the published ones. Every row says whose it is.

  make_table e1       VGG16 on CIFAR-10: accuracy, time, memory
  make_table e2       Wide-ResNet-28-10 on CIFAR-10 at O0 to O3
  make_table e3       SE-ResNeXt50 and DenseNet161 on CIFAR-10
  make_table e4       ResNets on ImageNet: images per second, loss
  make_table e5       an MLP and a CNN for MNIST: time, memory
"""

# The module's docstring is the text of `make_table --help`.
from __future__ import annotations

import argparse
import csv
import functools
import io
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ampfuse.command_line import UsageError, check_writable, run_alone
from ampfuse.experiments import results
from ampfuse.experiments.results import RECIPES, Row
from ampfuse.experiments.settings import VARIANTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("table", metavar="recipe", choices=RECIPES, help="which table: e1 to e5")
    results.add_selection(parser, recipe=False)
    what = "also write your rows to FILE, with device, versions, date, means and deviations"
    add("--csv", type=Path, metavar="FILE", help=what)
    add("--no-published", action="store_true", help="only your rows")


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Print and write the table, and return the exit status."""
    own = results.measured(args.results) if args.results.is_dir() else []
    if own := [row for row in own if row.recipe == args.table]:
        own = results.chosen(own, args)
    else:
        how = f"ampfuse train {RECIPES[args.table]} --recipe {args.table}"
        reason = f"{args.results}: no results of {args.table}; to measure them: {how}"
        if args.csv or args.no_published:
            raise UsageError(reason)
        print(reason, file=sys.stderr)
    if args.csv:
        check_writable("--csv", args.csv.parent)
        write_csv(args.csv, own)
    print(table([*([] if args.no_published else results.published(args.table)), *own]))
    return 0


def table(rows: Sequence[Row], columns: Sequence[str] = ()) -> str:
    """`rows` as a Markdown table of `columns` (default: :data:`PUBLISHED`) that are not empty, with
    an explanation."""
    own = [row for row in rows if row.runs]
    differing = results.differing(own, results.SHARED)
    cell_of = {**CELLS, "note": functools.partial(_note, differing=differing)}
    parts = []
    for name in columns or PUBLISHED:
        cells = [cell_of[name](row) for row in rows]
        if any(cells) or name == "note":
            width = max(map(len, (name, *cells)))
            parts.append([text.ljust(width) for text in (name, "-" * width, *cells)])
    text = "\n".join("| " + " | ".join(line) + " |" for line in zip(*parts, strict=True))
    if any(row.recipe == "e1" and not row.runs for row in rows):
        text += (
            "\n\nPublished: ± is the population standard deviation; memory is what nvidia-smi "
            "reported, in MiB."
        )
    if not own:
        return text
    facts = [f"memory by {row.memory_kind}" for row in own]
    facts += [f"torch {row.conditions['torch']}" for row in own]
    facts += [f"ampfuse {row.conditions['ampfuse']}" for row in own]
    facts += [f"{row.date:.10}" for row in own]
    return (
        f"{text}\n\nMeasured here: time of training, without warm-up and evaluation; 1 MB is 10^6 "
        f"bytes; ± is the sample standard deviation of n runs; {', '.join(dict.fromkeys(facts))}."
    )


def explained(rows: Sequence[Row]) -> str:
    """What the variants of measured `rows` are, a line each."""
    lines = (f"{row.variant}: {VARIANTS[row.conditions['precision']]}" for row in rows)
    return "\n".join(dict.fromkeys(lines))


# Conditions that every row shows.
_SHOWN = ("data", "graph", "world_size", "device")


def _note(row: Row, differing: Sequence[str]) -> str:
    """The text of the last column: why a figure is missing, and which conditions differ."""
    if not row.runs:
        return row.note
    conditions = row.conditions
    notes = ["re-enactment", row.note]
    if conditions["data"] in ("synthetic", "digits"):
        notes.append(f"{conditions['data']} data")
    if conditions.get("graph"):
        notes.append("graph")
    if conditions["world_size"] > 1:
        notes.append(f"{conditions['world_size']} processes")
    notes.append(results.described(row, (name for name in differing if name not in _SHOWN)))
    return "; ".join(filter(None, notes))


def _device(row: Row) -> str:
    """The label of the runs, and the name of the device: a number names its hardware."""
    device = row.conditions.get("device", row.gpu)
    return row.gpu if row.gpu == device else f"{row.gpu} ({device})"


def _shown(row: Row, name: str, factor: float = 1.0) -> str:
    """The cell of field `name`: a word or a number, measured ones with four significant digits;
    mean and deviation of repeats."""
    mean, std = getattr(row, name), getattr(row, f"{name.removesuffix('_mean')}_std", None)
    if mean is None or isinstance(mean, str):
        return mean or ""
    places = 6
    if isinstance(mean, float) and row.runs:
        places = max(0, 3 - math.floor(math.log10(abs(factor * mean)))) if mean else 0
    rounded = [round(factor * number, places) for number in (mean, std) if number is not None]
    return " ± ".join(f"{number:.10g}" for number in rounded)


def _cell(name: str) -> Callable[[Row], str]:
    return functools.partial(_shown, name=name)


# The text of each column but the note: of all rows, and of measured ones alone.
_OF_ALL: dict[str, Callable[[Row], str]] = {
    "source": lambda row: "measured here" if row.runs else "published",
    "environment": _cell("platform"),
    "GPU": _device,
    "model": _cell("model"),
    "variant": _cell("variant"),
    "optimizer": _cell("optimizer"),
    "batch size": _cell("batch_size"),
    "iterations": _cell("iterations"),
    "epochs": _cell("epochs"),
    "time, s": _cell("time_s_mean"),
    "images/s": _cell("images_per_s_mean"),
    "min": _cell("images_per_s_min"),
    "max": _cell("images_per_s_max"),
    "memory, MB": _cell("memory_mb_mean"),
    "accuracy, %": _cell("accuracy_pct_mean"),
    "loss last": _cell("loss_last_mean"),
    "loss mean": _cell("loss_mean_mean"),
    "n": _cell("n"),
}
_OF_MEASURED: dict[str, Callable[[Row], str]] = {
    "step, ms": lambda row: _shown(row, "time_s_mean", 1e3 / row.iterations),
    "skipped": lambda row: f"{row.skipped_steps:.4g}",
    "scale": lambda row: "" if row.scale is None else f"{row.scale:,.10g}",
    "outcome": lambda row: row.note,
}
CELLS = {**_OF_ALL, **_OF_MEASURED}
# The columns of a table beside published rows, and of a command that trains.
PUBLISHED = [*_OF_ALL, "note"]
_TRAINED = "variant|batch size|step, ms|images/s|memory, MB|loss last|accuracy, %|skipped|scale"
TRAINED = [*_TRAINED.split("|"), "outcome"]


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write :func:`results.records` of `rows` as CSV."""
    records, text = results.records(rows), io.StringIO()
    names = dict.fromkeys(name for record in records for name in record)
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    results.write(path, text.getvalue().encode())


main = functools.partial(run_alone, sys.modules[__name__])

if __name__ == "__main__":
    sys.exit(main())
