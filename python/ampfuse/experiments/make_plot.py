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
import textwrap
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ampfuse.command_line import UsageError, check_installed, check_writable, run_alone
from ampfuse.experiments import results
from ampfuse.experiments.results import EXPERIMENTS, METHODS, Row, file_name, listed
from ampfuse.files import atomic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    results.add_selection(parser, recipe=True)
    add, std = parser.add_argument, "error bars for time and memory: the repeats' deviation"
    add("--plot_std", "--plot-std", action="store_true", help=std)
    add("--published", action="store_true", help="draw the published results, not yours")
    where = "folder for the figures (default: RESULTS/figures; for --published, its subfolder "
    add("--output", type=Path, metavar="DIR", help=where + "published)")


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Draw all figures, then write them, and return the exit status."""
    check_installed("experiments", "matplotlib")
    output = args.output or args.results / "figures"
    check_writable("--output", output)
    found = drawn(_rows(args), std=args.plot_std or args.published)
    print(*save(found, output / "published" if args.published else output), sep="\n")
    return 0


def _rows(args: argparse.Namespace) -> list[Row]:
    """The rows to draw."""
    if not (rows := results.published("e1") if args.published else results.measured(args.results)):
        raise UsageError(f"{args.results}: no results in this folder; train first")
    return results.chosen(rows, args)


def drawn(rows: Sequence[Row], *, std: bool = False) -> dict[str, Figure]:
    """All figures of all models by name, such as "CIFAR - Time" or "ImageNet resnet18 - Memory
    (std)", except those without values."""
    network, found = operator.itemgetter("experiment", "model"), {}
    for experiment, model in dict.fromkeys(map(network, rows)):
        ours = [row for row in rows if network(row) == (experiment, model)]
        title = EXPERIMENTS.get(experiment, experiment)
        # The main model of an experiment is not named, as in E1's names.
        if model not in ("vgg16", "mnist_cnn", "mlp") and experiment != "demo":
            title += f" {model}"
        for bars, kind in itertools.product((False, True) if std else (False,), _KINDS):
            name = file_name(f"{title} - {kind.title()}{' (std)' * bars}")
            with contextlib.suppress(NothingToDraw):
                found[name] = against_batch(ours, kind, std=bars)
    if not found:
        raise UsageError("the chosen results have nothing to draw")
    return found


def save(figures: dict[str, Figure], folder: Path) -> list[Path]:
    """Write `figures` into `folder` as PNG: all of them, or none if that fails."""
    paths = [folder / f"{name}.png" for name in figures]
    with contextlib.ExitStack() as stack:
        for path, figure in zip(paths, figures.values(), strict=True):
            buffer = io.BytesIO()  # the PNG writer seeks
            figure.savefig(buffer, dpi=150)
            stack.enter_context(atomic(path)).write(buffer.getvalue())
    return paths


# ---- lines ---------------------------------------------------------------------------------------


class NothingToDraw(UsageError):
    """The rows have no values for this figure."""


class Line(NamedTuple):
    """Rows of one GPU, method and set of conditions; `name` is the method, and the conditions in
    which it differs from other lines."""

    gpu: str
    name: str
    rows: list[Row]


# Only methods with the same values of these are comparable, so names tell where they differ from
# the usual ones.
_USUAL = {"world_size": 1, "loader": "resident", "channels_last": True, "cudnn_benchmark": True}
_USUAL |= {"graph": False, "deterministic": False}
_MUST_BE_ALIKE = ("data", "kind", "image_size", "augment", "shuffle", *_USUAL)
_WORDS = {"loader": "{} loader", "world_size": "{} processes"}
_WORDS |= dict.fromkeys(("data", "arm", "device"), "{}")


def lines(rows: Sequence[Row]) -> list[Line]:
    """The lines of `rows`, which are of one model. Raises UsageError if the runs of a line have
    neither iterations nor epochs in common."""
    if len(models := _distinct(row["model"] for row in rows)) > 1:
        raise UsageError(f"results of {', '.join(models)}: choose one model with --model")
    parts: dict[tuple[str, ...], list[Row]] = {}
    for alike in _grouped(rows, "source", "gpu", "method"):
        # Conditions that follow the batch size (such as lr) make no line of their own.
        sizes = _grouped(alike, "batch_size")
        names = [name for name in _MUST_BE_ALIKE if _varies(rows, name)]
        names += [n for n in alike[0]["conditions"] if any(_varies(size, n) for size in sizes)]
        for row in alike:
            key = (row["source"], row["gpu"], row["method"], *_words(row, _distinct(names)))
            parts.setdefault(key, []).append(row)
    several_sources = len({row["source"] for row in rows}) > 1
    several_lengths = len({_length(members) for members in parts.values()}) > 1
    found = []
    for (source, gpu, method, *words), members in parts.items():
        words += [source] * several_sources + [_length(members)] * several_lengths
        name = f"{method} ({', '.join(words)})" if words else method
        found.append(Line(gpu, name, sorted(members, key=lambda row: row["batch_size"])))
    return found


def _length(rows: Sequence[Row]) -> str:
    """The length that all runs of a line have: "100 iterations", or else "2 epochs"."""
    lengths = []
    for unit in ("iterations", "epochs"):
        numbers = sorted({row[unit] for row in rows} - {None})
        lengths.append(f"{listed(numbers)} {unit}")
        if len(numbers) == 1:
            return lengths[-1]
    first = rows[0]
    raise UsageError(
        f"{first['gpu']} {first['method']} of {first['model']}: runs of different length "
        f"({'; '.join(lengths)}) cannot be one line: choose with --iteration N or --epochs N"
    )


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _grouped(rows: Sequence[Row], *columns: str) -> Collection[list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups.values()


def _varies(rows: Sequence[Row], name: str) -> bool:
    return len({str(row["conditions"].get(name)) for row in rows}) > 1


def _words(row: Row, names: Sequence[str]) -> list[str]:
    """These conditions of `row` as words, such as "graph", "workers loader" or "lr 0.1"."""
    words = []
    for name in names:
        value = row["conditions"].get(name)
        if value is None or value == _USUAL.get(name):
            continue
        if isinstance(value, bool):
            words.append(name if value else f"no {name}")
        else:
            words.append(_WORDS.get(name, f"{name} {{}}").format(listed([value])))
    return words


# ---- figures -------------------------------------------------------------------------------------

_KINDS = {"time": ("time_s", "training time", "s"), "memory": ("memory_mb", "device memory", "MB")}
_DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 3)), (0, (8, 2, 2, 2)))
_MARKERS = "os^Dv<>ph"


def against_batch(rows: Sequence[Row], kind: str, *, std: bool = False) -> Figure:
    """Training "time", or "memory" in MB of 10^6 bytes, against batch size: a line per GPU and
    method. For a single batch size, a bar per method and GPU. All rows are of one model.

    `std` shows the sample standard deviation of the repeats as error bars.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    column, what, unit = _KINDS[kind]
    mean, rows = f"{column}_mean", [row for row in rows if row["batch_size"]]
    batches = sorted({row["batch_size"] for row in rows if row[mean]})
    are_bars = len(batches) == 1
    if not batches:
        raise NothingToDraw("the results have no values for this figure")
    found = lines([row for row in rows if row[mean] or row["diverged"]])
    lengths = _distinct(_length(line.rows) for line in found)
    if kind == "time" and len(lengths) == 1:
        what += f" of {lengths[0]}"
    if kind == "memory" and {row["memory_kind"] for row in rows} == {"process RSS"}:
        what = "memory of the process"
    names, gpus = _distinct(line.name for line in found), _distinct(line.gpu for line in found)
    figure = Figure(figsize=(7.0, 3.8), layout="constrained")  # inches: a notebook's column
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y" if are_bars else "both", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    width = 0.8 / len(gpus)  # bars of one method stand next to each other
    for line in found:
        x, y, errors = [], [], []
        offset = (gpus.index(line.gpu) + 0.5) * width - 0.4
        for row in line.rows:
            place = names.index(line.name) + offset if are_bars else row["batch_size"]
            if row[mean]:
                x, y = [*x, place], [*y, row[mean]]
                errors.append(row[f"{column}_std"] or 0.0)
            else:
                text = f"  {row['method']} diverged"
                axes.text(place, 0, text, rotation=90, va="bottom", fontsize=6.5)
        style = _style_of(line, names, gpus)
        if not are_bars:
            axes.errorbar(x, y, errors if std else None, capsize=2, **style)
        elif x:  # the axis names the method, the legend the GPU
            look = {"color": style["color"], "label": line.gpu, "capsize": 2}
            axes.bar(x, y, width, yerr=errors if std else None, **look)
    if are_bars:
        rotation = 90 if len(names) > 6 else 0
        axes.set_xticks(range(len(names)), names, rotation=rotation, fontsize=8)
        axes.set_xlim(-0.6, len(names) - 0.4)  # also where the only run diverged
    else:
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, batches, rotation=90 if len(batches) > 8 else 0)
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="" if are_bars else "batch size", ylabel=f"{what}, {unit}")
    axes.set_ylim(0, 1.05 * axes.dataLim.y1)  # room for the marker and cap at the top
    at = f", batch size {batches[0]}" if are_bars else ""
    title = f"{_title_of(rows)}: {what}{at}" + ", mean ± standard deviation" * std
    figure.suptitle(textwrap.fill(title, 90), fontsize=10)
    if are_bars and len(gpus) == 1:
        figure.supxlabel(textwrap.fill(gpus[0], 80), fontsize=8)
    else:
        _add_legend(figure, gpus)
    return figure


def _style_of(line: Line, names: Sequence[str], gpus: Sequence[str]) -> dict[str, Any]:
    """Label and look. The GPU determines the colour and the method the dash; with one GPU the
    method determines both."""
    dash = names.index(line.name)
    number = color = gpus.index(line.gpu) if len(gpus) > 1 else dash
    if len(gpus) == 1 and line.name in METHODS:  # the same colour in every figure
        color = METHODS.index(line.name)
    style = {"color": f"C{color % 10}", "marker": _MARKERS[number % len(_MARKERS)], "markersize": 5}
    style["linestyle"] = _DASHES[dash % len(_DASHES)]
    return {"label": line.name if len(gpus) == 1 else f"{line.gpu} {line.name}", **style}


def _add_legend(figure: Figure, gpus: Sequence[str]) -> None:
    """Below the axes, where it hides nothing. A single GPU is its title."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    by_label = {textwrap.fill(label, 44): h for label, h in zip(labels, handles, strict=True)}
    longest = max(len(part) for label in by_label for part in label.split("\n"))
    # Each of several GPUs has a column, if there is room for its labels.
    room = max(1, int(100 / (longest + 9)))
    columns = min(room, len(by_label), 4 if len(gpus) == 1 else len(gpus))
    look = {"loc": "outside lower center", "frameon": False, "handlelength": 3.6, "fontsize": 8}
    if len(gpus) == 1:
        look |= {"title": textwrap.fill(gpus[0], 80), "title_fontsize": 8}
    figure.legend(by_label.values(), by_label.keys(), ncols=columns, **look)
    figure.set_figheight(figure.get_figheight() + 0.2 * (-(-len(by_label) // columns) + 1))


_MODELS = {"vgg16": "VGG16", "wrn28_10": "WRN-28-10", "wrn16_4": "WRN-16-4", "mlp": "MLP"}
_MODELS |= {"resnet18": "ResNet-18", "resnet50": "ResNet-50", "mnist_cnn": "Convolutional network"}
_DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "mnist": "MNIST", "imagenet": "ImageNet"}
_DATA |= {"digits": "handwritten digits"}


def _title_of(rows: Sequence[Row]) -> str:
    """The model and its data, or whose figures these are."""
    model = rows[0]["model"]
    if rows[0]["experiment"] == "demo":
        model = "mnist_cnn"
    name = _MODELS.get(model, model)
    conditions = [row["conditions"] for row in rows if row["source"] == "measured"]
    if not conditions:
        return f"{name}, published figures"
    data = set()
    for of in conditions:
        is_synthetic = of["data"] == "synthetic"
        kind = of["kind"] if is_synthetic else of["data"]
        data.add("synthetic " * is_synthetic + _DATA.get(kind, kind))
    return f"{name} on {data.pop()}" if len(data) == 1 else name


main = functools.partial(run_alone, sys.modules[__name__])

if __name__ == "__main__":
    sys.exit(main())
