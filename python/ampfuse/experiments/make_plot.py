"""Draw the figures of results: time and memory against batch size. Reads the result files below
--results; writes each figure as PNG and prints the files' names.

  make_plot                                        everything there is
  make_plot --GPU T4 V100 --method FP32 FP16 amp --batch 128 256 512 1024 2048 --plot_std
  make_plot --published                            the published figures of VGG16 on CIFAR-10
"""

# The module's docstring is the text of `make_plot --help`. Nothing heavy is imported up here.
from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import operator
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ampfuse.command_line import UsageError, check_installed, check_writable, run_alone
from ampfuse.experiments import results
from ampfuse.experiments.results import EXPERIMENTS, Row, file_name
from ampfuse.files import atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Models that stand for their experiment: their figures are named after that alone, as E1 named its.
_ITS_OWN = {"vgg16", "mnist_cnn", "mlp"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    results.add_selection(parser, recipe=True)
    add, std = parser.add_argument, "time and memory with error bars: the repeats' deviation"
    add("--plot_std", "--plot-std", action="store_true", help=std)
    add("--published", action="store_true", help="draw the published figures instead of own ones")
    where = "folder for the figures (default: figures in that of the results); published ones go "
    add("--output", type=Path, metavar="DIR", help=where + "into published in there")


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Do what `args` say and return the exit status. Nothing is written unless all could be
    drawn."""
    check_installed("experiments", "matplotlib")
    output = args.output or args.results / "figures"
    check_writable("--output", output)
    rows = _rows(args)
    found = drawn(rows, std=args.plot_std or args.published)
    written = save(found, output / "published" if args.published else output)
    print(*written, sep="\n")
    return 0


def _rows(args: argparse.Namespace) -> list[Row]:
    """What is to be drawn, published or own."""
    if not (rows := results.published("e1") if args.published else results.measured(args.results)):
        raise UsageError(f"{args.results}: no results in this folder; train first")
    return results.chosen(rows, args)


def figure_name(experiment: str, model: str, what: str) -> str:
    """The name of a figure's file: "CIFAR - Time", "ImageNet resnet18 - Memory (std)"."""
    title = EXPERIMENTS.get(experiment, experiment)
    own = model in _ITS_OWN or experiment == "demo"
    return file_name(f"{title} - {what}" if own else f"{title} {model} - {what}")


def save(figures: dict[str, Figure], folder: Path) -> list[Path]:
    """Write `figures`, by name, into `folder` as PNG: all of them, or none if that fails."""
    paths = [folder / f"{name}.png" for name in figures]
    with contextlib.ExitStack() as stack:
        for path, figure in zip(paths, figures.values(), strict=True):
            buffer = io.BytesIO()  # PNG is written to and fro
            figure.savefig(buffer, dpi=150)
            stack.enter_context(atomic(path)).write(buffer.getvalue())
    return paths


def drawn(rows: Sequence[Row], *, std: bool = False) -> dict[str, Figure]:
    """Every kind of figure for every model, by name; without those for which the results hold
    nothing."""
    from ampfuse.experiments import figures

    ways = (False, True) if std else (False,)
    net, found = operator.itemgetter("experiment", "model"), {}
    for experiment, model in dict.fromkeys(map(net, rows)):
        ours = [row for row in rows if net(row) == (experiment, model)]
        for bars, kind in itertools.product(ways, ("time", "memory")):
            name = figure_name(experiment, model, kind.title() + " (std)" * bars)
            with contextlib.suppress(figures.NothingToDraw):
                found[name] = figures.against_batch(ours, kind, std=bars)
    if not found:
        raise UsageError("the chosen results hold nothing to draw")
    return found


main = functools.partial(run_alone, sys.modules[__name__])

if __name__ == "__main__":
    sys.exit(main())
