"""Draw the figures of results: time and memory against batch size. Reads the result files below
--results; writes each figure as PNG and prints the files' names.

  make_plot                                        everything there is
  make_plot --GPU T4 V100 --method FP32 FP16 amp --batch 128 256 512 1024 2048 --plot_std
  make_plot --published                            the published figures of VGG16 on CIFAR-10
"""

# The module's docstring is the text of `make_plot --help`.
from __future__ import annotations

import argparse
import functools
import io
import itertools
import operator
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampfuse.command_line import UsageError, check_installed, check_writable, run_alone
from ampfuse.experiments import results
from ampfuse.experiments.results import TITLES, Row, file_name, listed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    results.add_selection(parser, recipe=True)
    add = parser.add_argument
    bars = "error bars for time and memory: the repeats' deviation"
    add("--plot_std", "--plot-std", action="store_true", help=bars)
    add("--published", action="store_true", help="draw E1's published results, not yours")
    default = "RESULTS/figures; for --published, its subfolder published"
    add("--output", type=Path, metavar="DIR", help=f"folder for the figures (default: {default})")


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Draw all figures, then write them, and return the exit status."""
    check_installed("experiments", "matplotlib")
    output = args.output or args.results / "figures"
    check_writable("--output", output)
    if not (rows := results.published("e1") if args.published else results.measured(args.results)):
        raise UsageError(f"{args.results}: no results in this folder; train first")
    figures = drawn(results.chosen(rows, args), std=args.plot_std or args.published)
    print(*save(figures, output / "published" if args.published else output), sep="\n")
    return 0


# Figures do not name it, as E1's; the demo has one model.
_MAIN_MODELS = {"cifar": "vgg16", "imagenet": None, "mnist": "mnist_cnn", "mlp": "mlp"}


def drawn(rows: Sequence[Row], *, std: bool = False) -> dict[str, Figure]:
    """All figures of all models by name, such as "CIFAR - Time" or "ImageNet resnet18 - Memory
    (std)", except those without values."""
    by_model: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_model.setdefault((row.experiment, row.model), []).append(row)
    figures = {}
    for (experiment, model), members in by_model.items():
        title = TITLES.get(experiment, experiment)
        if model != _MAIN_MODELS.get(experiment, model):
            title += f" {model}"
        for suffix, kind in itertools.product(("", " (std)") if std else ("",), _KINDS):
            if figure := against_batch(members, kind, std=suffix != ""):
                figures[file_name(f"{title} - {kind.title()}{suffix}")] = figure
    if not figures:
        raise UsageError("the chosen results have nothing to draw")
    return figures


def save(figures: dict[str, Figure], folder: Path) -> list[Path]:
    """Write `figures` into `folder` as PNG."""
    paths = [folder / f"{name}.png" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(buffer := io.BytesIO(), dpi=150)  # the PNG writer seeks
        results.write(path, buffer.getvalue())
    return paths


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


Lines = dict[tuple[str, str], list[Row]]


def lines(rows: Sequence[Row]) -> Lines:
    """The rows of each line, by its GPU and its name.

    The name is the variant. If rows of one batch size differ in conditions, these follow in
    parentheses, at all batch sizes; if lines differ in length, the length follows.
    """
    by_name: Lines = {}
    for gpu, variant in _distinct((row.gpu, row.variant) for row in rows):
        members = [row for row in rows if (row.gpu, row.variant) == (gpu, variant)]
        names = results.differing(members, ["batch_size"])
        for row in members:
            suffix = results.described(row, names)
            name = f"{variant} ({suffix})" if suffix else variant
            by_name.setdefault((gpu, name), []).append(row)
    if len(_lengths(by_name)) == 1:
        return by_name
    return {(gpu, f"{name}, {_length(rows)}"): rows for (gpu, name), rows in by_name.items()}


def _lengths(by_name: Lines) -> set[str]:
    return {_length(rows) for rows in by_name.values()}


def _length(rows: Sequence[Row]) -> str:
    """The length that all runs of a line have: "100 iterations", or else "2 epochs"."""
    for unit in ("iterations", "epochs"):
        if len(numbers := {getattr(row, unit) for row in rows}) == 1:
            return f"{listed(numbers)} {unit}"
    what = f"{rows[0].gpu} {rows[0].variant} of {rows[0].model}: results have different lengths"
    raise UsageError(f"{what}: choose with --iteration N or --epochs N")


_KINDS = {"time": ("time_s", "training time", "s"), "memory": ("memory_mb", "device memory", "MB")}
_DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 3)), (0, (8, 2, 2, 2)))


def against_batch(rows: Sequence[Row], kind: str, *, std: bool = False) -> Figure | None:
    """Draw training "time", or "memory" in MB of 10^6 bytes (published: MiB), against batch size.

    There is a line for each GPU and variant; for a single batch size, a bar for each. Where a
    variant diverged, text says so. All rows are of one model. `std` adds error bars: the sample
    standard deviation of the repeats.

    Returns:
        None if the rows have no values.
    """
    from matplotlib.figure import Figure

    column, what, unit = _KINDS[kind]
    mean_of = operator.attrgetter(f"{column}_mean")
    rows = [row for row in rows if row.batch_size and (mean_of(row) or row.diverged)]
    if not any(map(mean_of, rows)):
        return None
    by_name = lines(rows)
    if kind == "time" and len(lengths := _lengths(by_name)) == 1:
        what += f" of {listed(lengths)}"
    if {row.memory_kind for row in rows} == {"process RSS"} and kind == "memory":
        what = "memory of the process"
    if kind == "memory" and not any(row.runs for row in rows):
        unit = "MiB"  # nvidia-smi's
    batches = sorted({row.batch_size for row in rows})
    are_bars = len(batches) == 1
    figure = Figure(figsize=(7.0, 4.2), layout="constrained")  # inches: a notebook's column
    axes = figure.subplots()
    _draw(axes, by_name, column, are_bars=are_bars, std=std)
    if not are_bars:
        axes.set(xscale="log", xlabel="batch size")
        axes.set_xticks(batches, batches, rotation=90 if len(batches) > 8 else 0)
        axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y" if are_bars else "both", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_ylabel(f"{what}, {unit}")
    axes.set_ylim(0, 1.05 * axes.dataLim.y1)  # room for the marker and cap at the top
    title = f"{_title_of(rows)}: {what}"
    if are_bars:
        title += f", batch size {batches[0]}"
    if std:
        title += ", mean ± standard deviation"
    figure.suptitle(textwrap.fill(title, 90), fontsize=10)
    gpus = _distinct(row.gpu for row in rows)
    if are_bars and len(gpus) == 1:  # each bar has a colour of its own
        figure.supxlabel(textwrap.fill(gpus[0], 80), fontsize=8)
    else:
        _add_legend(figure, axes, gpus)
    return figure


def _add_legend(figure: Figure, axes: Axes, gpus: Sequence[str]) -> None:
    by_label = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    labels = [textwrap.fill(label, 28) for label in by_label]
    style = {"loc": "outside right center", "frameon": False, "handlelength": 3.6, "fontsize": 7}
    if len(gpus) == 1:  # it is the title of the legend
        style |= {"title": textwrap.fill(gpus[0], 28), "title_fontsize": 7}
    figure.legend(by_label.values(), labels, **style)


def _draw(axes: Axes, by_name: Lines, column: str, *, are_bars: bool, std: bool) -> None:
    """Draw the lines or bars. The color shows the GPU and the dash the variant; with a single GPU
    both show the variant. Bars of one variant stand next to each other."""
    gpus, names = (_distinct(part) for part in zip(*by_name, strict=True))
    width = 0.8 / len(gpus)
    for (gpu, name), members in by_name.items():
        # The axis of bars names the variant, the legend the GPU.
        bar = names.index(name) + (gpus.index(gpu) + 0.5) * width - 0.4
        points = []
        for row in sorted(members, key=lambda row: row.batch_size):
            x = bar if are_bars else row.batch_size
            mean, deviation = (getattr(row, f"{column}_{part}") for part in ("mean", "std"))
            if mean:
                points.append((x, mean, deviation or 0))
            if row.diverged:
                what = row.note.partition(" in step")[0]  # such as "2 of 3 diverged"
                text = f"  {row.variant} {what}"
                axes.text(x, 0, text, rotation=90, va="bottom", fontsize=6.5)
        if not points:
            continue
        xs, ys, errors = zip(*points, strict=True)
        color = f"C{(gpus.index(gpu) if len(gpus) > 1 else names.index(name)) % 10}"
        style = {"yerr": errors if std else None, "capsize": 2, "color": color}
        if are_bars:
            axes.bar(xs, ys, width, label=gpu, **style)
        else:
            style |= {"linestyle": _DASHES[names.index(name) % len(_DASHES)], "marker": "."}
            axes.errorbar(xs, ys, label=name if len(gpus) == 1 else f"{gpu} {name}", **style)
    if are_bars:
        axes.set_xticks(range(len(names)), names, rotation=90 if len(names) > 6 else 0, fontsize=8)
        axes.set_xlim(-0.6, len(names) - 0.4)  # also where a run diverged


_MODELS = {"vgg16": "VGG16", "wrn28_10": "WRN-28-10", "mlp": "MLP", "mnist_cnn": "CNN"}
_DATA = {"cifar10": "CIFAR-10", "mnist": "MNIST", "imagenet": "ImageNet", "digits": "digits"}


def _title_of(rows: Sequence[Row]) -> str:
    """The model and its data: "VGG16 on CIFAR-10"; for published results, the model alone."""
    model = rows[0].model
    data = []
    for conditions in (row.conditions for row in rows if row.runs):
        kind = conditions["kind"]
        if conditions["data"] == "synthetic":
            data.append(f"synthetic {_DATA.get(kind, kind)}")
        else:
            data.append(_DATA.get(conditions["data"], kind))
    on = f" on {listed(_distinct(data))}" if data else ", published figures"
    name = "CNN" if rows[0].experiment == "demo" else _MODELS.get(model)
    return (name or model.replace("resnet", "ResNet-")) + on


main = functools.partial(run_alone, sys.modules[__name__])

if __name__ == "__main__":
    sys.exit(main())
