"""Draw the figures of results: time and memory against batch size, speed-up against FP32, accuracy
against time, loss scale and overflows over steps. Reads the result files below --results; writes
each figure as PNG and as SVG and prints the files' names.

  make_plot                                        everything there is
  make_plot --GPU T4 V100 --method FP32 FP16 amp --batch 128 256 512 1024 2048 --plot_std
  make_plot --published                            the published figures of VGG16 on CIFAR-10
"""

# The module's docstring is the text of `make_plot --help`. Nothing heavy is imported up here.
from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ampfuse.command_line import check_writable, run_alone
from ampfuse.experiments import results
from ampfuse.experiments.results import EXPERIMENTS, Row, file_name
from ampfuse.files import atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Models that stand for their experiment: their figures are named after that alone, as E1 named its.
_ITS_OWN = {"vgg16", "mnist_cnn", "mlp"}
_DPI = 150
_INSTALL = "pip install 'ampfuse[experiments]'"


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
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{parser.prog}: matplotlib missing: {_INSTALL}", file=sys.stderr)
        return 1
    output = args.output or args.results / "figures"
    check_writable("--output", output)
    rows = _rows(args, warn=lambda line: print(f"{parser.prog}: {line}", file=sys.stderr))
    of = "epochs" if args.epochs else "iterations"
    found = drawn(rows, of, std=args.plot_std, published=args.published)
    written = save(found, output / "published" if args.published else output)
    print(*written, sep="\n")
    return 0


def figure_name(experiment: str, model: str, what: str) -> str:
    """The name of a figure's files: "CIFAR - Time", "ImageNet resnet18 - Memory (std)"."""
    title = EXPERIMENTS.get(experiment, experiment)
    own = model in _ITS_OWN or experiment == "demo"
    return file_name(f"{title} - {what}" if own else f"{title} {model} - {what}")


def save(figures: dict[str, Figure], folder: Path) -> list[Path]:
    """Write `figures`, by name, into `folder` as PNG and SVG: all of them, or none if that
    fails."""
    import matplotlib

    contents = {}
    # The same figure is the same file, so that a folder of figures can be compared.
    with matplotlib.rc_context({"svg.hashsalt": "ampfuse"}):
        for name, figure in figures.items():
            for kind, options in (("png", {"dpi": _DPI}), ("svg", {"metadata": {"Date": None}})):
                buffer = io.BytesIO()
                figure.savefig(buffer, format=kind, **options)
                contents[folder / f"{name}.{kind}"] = buffer.getvalue()
    with contextlib.ExitStack() as stack:
        for path, content in contents.items():
            stack.enter_context(atomic(path)).write(content)
    return list(contents)


def _rows(args: argparse.Namespace, warn: Callable[[str], object]) -> list[Row]:
    """What is to be drawn, published or own."""
    if args.published:
        rows = results.published("e1")
    elif not (rows := results.measured(args.results, skipped=warn)):
        raise results.ResultsError(f"{args.results}: no results in this folder; train first")
    rows = results.chosen(rows, args)
    if args.plot_std and all(row.n == 1 for row in rows):
        warn("--plot_std: no run was repeated, so there are no error bars (train with --repeats 5)")
    return rows


# The end of the files' name, and the function of :mod:`figures` that draws them.
_AGAINST_BATCH = {"Time": "time_against_batch", "Memory": "memory_against_batch"}
_FURTHER = {"Speed-up": "speedup", "Accuracy": "accuracy_against_time", "Loss scale": "loss_scale"}


def drawn(
    rows: Sequence[Row], of: str = "iterations", *, std: bool = False, published: bool = False
) -> dict[str, Figure]:
    """Every kind of figure for every model, by name; without those for which the results hold
    nothing."""
    from ampfuse.experiments import figures

    kinds = [(what, function, {}) for what, function in _AGAINST_BATCH.items()]
    if std or published:
        kinds += [(f"{what} (std)", function, {"std": True}) for what, function, _ in kinds]
    if not published:
        kinds += [(what, function, {}) for what, function in _FURTHER.items()]
    found = {}
    for experiment, model in dict.fromkeys((row.experiment, row.model) for row in rows):
        ours = [row for row in rows if (row.experiment, row.model) == (experiment, model)]
        for what, function, options in kinds:
            with contextlib.suppress(figures.NothingToDraw):
                figure = getattr(figures, function)(ours, of=of, **options)
                found[figure_name(experiment, model, what)] = figure
    if not found:
        raise results.ResultsError("the chosen results hold nothing to draw")
    return found


main = functools.partial(
    run_alone, sys.modules[__name__], prog="python -m ampfuse.experiments.make_plot"
)

if __name__ == "__main__":
    sys.exit(main(None))
