"""The five figures: time and memory against batch size, speed-up, accuracy, loss scale."""

from __future__ import annotations

import itertools
import math
import operator
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from ampfuse.experiments.plots.lines import (
    USUAL,
    NothingToDraw,
    gpus_of,
    lengths_of,
    lines,
    rows_with,
)
from ampfuse.experiments.plots.style import (
    draw_bars,
    falling,
    finish,
    line_styles,
    make_panels,
    title_of,
)
from ampfuse.experiments.results import Row, Stat, listed


def time_against_batch(rows: Sequence[Row], *, std: bool = False, of: str = "iterations") -> Figure:
    """Training time against batch size, a line per GPU and method; bars if there is one batch size.

    `std` shows the sample standard deviation of the repeats as error bars. `of` is what the runs of
    a line must have the same number of, "iterations" or "epochs": else this raises ResultsError.
    """
    lengths = lengths_of(rows, of)
    length = f" of {listed(lengths)} {of}" if len(lengths) == 1 else ""
    return _against_batch(rows, "time_s", f"training time{length}", "s", std, of)


def memory_against_batch(
    rows: Sequence[Row], *, std: bool = False, of: str = "iterations"
) -> Figure:
    """Device memory against batch size, in MB of 10^6 bytes; else as :func:`time_against_batch`."""
    kinds = {run.memory_kind for row in rows for run in row.runs}
    what = "device memory"
    if "process RSS" in kinds:
        what = "memory of the process" if len(kinds) == 1 else "memory of the device or CPU process"
    return _against_batch(rows, "memory_mb", what, "MB", std, of)


def _against_batch(
    rows: Sequence[Row], field: str, what: str, unit: str, std: bool, of: str
) -> Figure:
    stat = operator.attrgetter(field)
    there = rows_with(rows, lambda row: stat(row) and row.batch_size)
    batches = sorted({row.batch_size for row in there})
    figure, (axes,) = make_panels([None])
    at_batch = ""
    axes.set_xlabel("batch size")
    if len(batches) > 1:
        drawn = lines(there, of=of)
        for place, (line, style) in enumerate(zip(drawn, line_styles(drawn), strict=True)):
            values = [stat(row) for row in line.rows]
            drawing = axes.errorbar(
                [row.batch_size for row in line.rows],
                [value.mean for value in values],
                yerr=[value.std or 0.0 for value in values] if std else None,
                label=line.label,
                capsize=2,
                elinewidth=0.9,
                **style,
            )
            if std:  # error bars side by side: moved on the paper, not in the data
                inches = 0.035 * (place - (len(drawn) - 1) / 2)
                move = ScaledTranslation(inches, 0, figure.dpi_scale_trans)
                for artist in drawing.get_children():
                    artist.set_transform(axes.transData + move)
        axes.margins(x=0.06)
        _batch_axis(axes, batches)
    else:
        (batch,) = batches
        shown = [row for row in rows if row.batch_size == batch and (stat(row) or row.diverged)]
        drawn = lines(shown, of=of)
        several = len(gpus_of(drawn)) > 1
        cells = {
            (line.gpu if several else batch, line.name): next(
                filter(None, map(stat, line.rows)), None
            )
            for line in drawn
        }
        if several:
            at_batch = f", batch size {batch}"
            axes.set_xlabel("")
        draw_bars(axes, cells, std=std)
    axes.set_ylabel(f"{what}, {unit}")
    axes.set_ylim(bottom=0)
    title = f"{title_of(rows)}: {what}{at_batch}" + ", mean ± standard deviation" * std
    return finish(figure, axes, gpus=gpus_of(drawn), title=title)


def _batch_axis(axes: Axes, batches: Sequence[int]) -> None:
    places = [math.log(batch / batches[0], batches[-1] / batches[0]) for batch in batches]
    upright = min(after - before for before, after in itertools.pairwise(places)) < 0.08
    labels, last = [], -1.0
    for batch, place in zip(batches, places, strict=True):
        has_room = not upright or place - last > 0.035
        labels.append(str(batch) if has_room else "")
        last = place if has_room else last
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, labels, rotation=90 if upright else 0)
    axes.xaxis.set_minor_locator(NullLocator())


# ---- speed-up ------------------------------------------------------------------------------------


def speedup(rows: Sequence[Row], *, of: str = "iterations") -> Figure:
    """How many times as fast as FP32 each method is: bars per batch size, a panel per GPU.

    Compared are mean times per iteration. All bars of a GPU and batch size have one yardstick, the
    tuned FP32 run on the same data, without graph or compilation if there is such a one; O0 where
    FP32 was not run. The axis names it. Where a row diverged, that stands in the bar's place.

    """
    rows = rows_with(rows, lambda row: row.batch_size and (row.time_s or row.diverged))
    drawn = lines(rows, of=of)
    cells: dict[str, dict[tuple[int, str], Stat | None]] = {}
    bases = []
    for line in drawn:
        for row in line.rows:
            base = _baseline(row, rows)
            if base is None or base is row:
                continue
            bases += [line.name for line in drawn if base in line.rows]
            of_gpu, key = cells.setdefault(line.gpu, {}), (row.batch_size, line.name)
            if step_s := _step_s(row):
                of_gpu[key] = Stat(_step_s(base) / step_s)
            else:
                of_gpu.setdefault(key, None)
    if not cells:
        raise NothingToDraw("no method beside FP32 on the same GPU at the same batch size")
    figure, panels = make_panels(list(cells), columns=1)
    shown = {name for of_gpu in cells.values() for _, name in of_gpu}
    names = [line.name for line in drawn if line.name in shown]
    for axes, of_gpu in zip(panels, cells.values(), strict=True):
        axes.axhline(1.0, color="black", linewidth=0.8, zorder=0.9)  # behind the bars
        draw_bars(axes, dict(sorted(of_gpu.items())), names=names)
        axes.set_ylabel(textwrap.fill(f"speed, times {' or '.join(dict.fromkeys(bases))}", 32))
    panels[-1].set_xlabel("batch size")
    title = f"{title_of(rows)}: speed-up of the training step"
    return finish(figure, *panels, gpus=list(cells), title=title)


def _step_s(row: Row) -> float | None:
    """Time per iteration, in seconds; per epoch where nobody noted the iterations."""
    length = row.iterations or row.epochs
    return row.time_s.mean / length if row.time_s and length else None


# What two runs must have in common for their speeds to be compared at all.
_SAME_WORK = ("data", "kind", "image_size", "augment", "world_size", "device")


def _baseline(row: Row, rows: Sequence[Row]) -> Row | None:
    """The FP32 row that `row` is to be compared with; it may be `row` itself."""
    comparable = [
        other
        for other in rows
        if other.time_s
        and (other.source, other.gpu, other.batch_size) == (row.source, row.gpu, row.batch_size)
        and all(other.conditions.get(name) == row.conditions.get(name) for name in _SAME_WORK)
    ]

    def oddities(other: Row) -> int:
        return sum(other.conditions.get(name, usual) != usual for name, usual in USUAL.items())

    for arm in ("FP32", "fp32", "O0"):  # published rows have E1's name for it
        if found := [other for other in comparable if other.arm == arm]:
            return min(found, key=oddities)
    return None


def accuracy_against_time(rows: Sequence[Row], *, of: str = "iterations") -> Figure:
    """Test accuracy against training time, from the runs' logs; means over repeats.

    A panel per batch size and a line per GPU and method. Runs that were evaluated once, at their
    end, have one point each: these are joined over the batch sizes, in one panel.
    """
    courses = {id(row): _accuracy_course(row) for row in rows}
    rows = rows_with(rows, lambda row: courses[id(row)] and row.batch_size)
    drawn = lines(rows, of=of)
    batches = sorted({row.batch_size for row in rows if row.batch_size})
    once = len(batches) > 1 and all(len(courses[id(row)]) == 1 for row in rows)
    panels: list[int | None] = [None] if once else list(batches)
    figure, all_axes = make_panels([f"batch size {batch}" for batch in panels])
    for axes, batch in zip(all_axes, panels, strict=True):
        for line, style in zip(drawn, line_styles(drawn), strict=True):
            here = (courses[id(row)] for row in line.rows if batch in (None, row.batch_size))
            if points := list(itertools.chain(*here)):
                seconds, percent = zip(*points, strict=True)
                axes.plot(seconds, percent, label=line.label, **style)
        axes.set(xlabel="training time, s", ylabel="test accuracy, %")
        axes.set_xlim(left=0)
    at_end = f" at the end, batch sizes {batches[0]} to {batches[-1]}" if once else ""
    title = f"{title_of(rows)}: test accuracy{at_end}{_alone(batches)}"
    return finish(figure, *all_axes, gpus=gpus_of(drawn), title=title)


def _alone(batches: Sequence[int]) -> str:
    return f", batch size {batches[0]}" if len(batches) == 1 else ""


def _accuracy_course(row: Row) -> list[tuple[float, float]]:
    """Mean (training time in s, accuracy in %) of each evaluation."""
    by_step: dict[int, list[tuple[float, float]]] = {}
    for run in row.runs:
        for line in () if run.diverged else run.log("evaluation"):
            if line["test_accuracy"] is not None:
                point = (line["time_s"], 100 * line["test_accuracy"])
                by_step.setdefault(line["step"], []).append(point)
    return [tuple(map(statistics.fmean, zip(*points, strict=True))) for points in by_step.values()]


def loss_scale(rows: Sequence[Row], *, of: str = "iterations") -> Figure:
    """Loss scale over steps, a cross at every overflow (a skipped step); a panel per batch size.
    Shown is the first repeat of each row that scales its loss."""
    logs = {id(row): _scale_log(row) for row in rows}
    rows = rows_with(rows, lambda row: row.batch_size and _is_scaled(logs[id(row)]))
    drawn = lines(rows, of=of)
    batches = sorted({row.batch_size for row in rows if row.batch_size})
    figure, all_axes = make_panels([f"batch size {batch}" for batch in batches])
    for axes, batch in zip(all_axes, batches, strict=True):
        for line, style, more in zip(drawn, line_styles(drawn), falling(len(drawn)), strict=True):
            look = {name: style[name] for name in ("color", "dashes")}
            look |= {"linewidth": 1.2 + 3.6 * more, "drawstyle": "steps-pre", "label": line.label}
            for row in (row for row in line.rows if row.batch_size == batch):
                log = logs[id(row)]
                scales = [log[0]["loss_scale"], *(entry["loss_scale"] for entry in log)]
                axes.plot([0, *(entry["step"] for entry in log)], scales, **look)
                # An overflow stands at the scale of its interval.
                overflows = [
                    (n, entry["loss_scale"]) for entry in log for n in entry["overflow_steps"]
                ]
                if overflows:
                    axes.plot(*zip(*overflows, strict=True), **_CROSS)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_minor_locator(NullLocator())
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, high / 16), high * 2)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.set(xlabel="step", ylabel="loss scale, factor")
    all_axes[0].plot([], [], **_CROSS, label="overflow, step skipped")
    title = f"{title_of(rows)}: loss scale{_alone(batches)}"
    return finish(figure, *all_axes, gpus=gpus_of(drawn), title=title)


_CROSS = {
    **{"marker": "x", "markersize": 7, "markeredgewidth": 1.6},
    **{"color": "black", "linestyle": "none", "zorder": 5},
}


def _scale_log(row: Row) -> list[dict[str, Any]]:
    """The log lines of the first repeat that tell a loss scale."""
    log = row.runs[0].log("interval") if row.runs else []
    return [line for line in log if line["loss_scale"] is not None]


def _is_scaled(log: Sequence[Mapping[str, Any]]) -> bool:
    return any(line["loss_scale"] != 1.0 or line["overflow_steps"] for line in log)
