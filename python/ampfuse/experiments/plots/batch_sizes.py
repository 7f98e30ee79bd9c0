"""Time and memory against batch size: the figures of E1."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from matplotlib.transforms import ScaledTranslation

from ampfuse.experiments.plots.drawing import (
    WIDTH,
    add_legend,
    draw_bars,
    line_styles,
    rows_with,
    set_title,
    title_of,
    unclutter,
)
from ampfuse.experiments.plots.grouping import gpus_of, lengths_of, lines, number
from ampfuse.experiments.results import Row, Stat

_RESIDENT = "process RSS"  # the kind of memory that runs on a CPU report


def time_against_batch(rows: Sequence[Row], *, std: bool = False, of: str = "iterations") -> Figure:
    """Training time against batch size, a line per GPU and method; bars if there is one batch size.

    Args:
        rows: of one model; every line must have runs of one length.
        std: show the sample standard deviation of the repeats as error bars.
        of: what counts as length, "iterations" or "epochs".

    Raises:
        ResultsError: there is nothing to draw, or a line would mix lengths.
    """
    lengths = lengths_of(rows, of)
    length = f" of {number(lengths[0])} {of}" if len(lengths) == 1 else ""
    return _against_batch(rows, "time_s", f"training time{length}", "s", std=std, of=of)


def memory_against_batch(
    rows: Sequence[Row], *, std: bool = False, of: str = "iterations"
) -> Figure:
    """Device memory against batch size, in MB of 10^6 bytes; else as :func:`time_against_batch`."""
    kinds = {run.memory_kind for row in rows for run in row.runs}
    what = "device memory"
    if _RESIDENT in kinds:
        what = "memory of the process" if len(kinds) == 1 else "memory of the device or CPU process"
    return _against_batch(rows, "memory_mb", what, "MB", std=std, of=of)


def _against_batch(
    rows: Sequence[Row], field: str, what: str, unit: str, *, std: bool, of: str
) -> Figure:
    def stat(row: Row) -> Stat | None:
        return getattr(row, field)

    there = rows_with(rows, lambda row: stat(row) and row.batch_size)
    batches = sorted({row.batch_size for row in there if row.batch_size})
    figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
    axes = figure.subplots()
    at_batch = ""
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
        drawn = lines(
            [row for row in rows if row.batch_size in batches and (stat(row) or row.diverged)],
            of=of,
        )
        several = len(gpus_of(drawn)) > 1
        cells = {
            (line.gpu if several else batches[0], line.name): next(
                filter(None, map(stat, line.rows)), None
            )
            for line in drawn
        }
        if several:
            at_batch = f", batch size {batches[0]}"
        else:
            axes.set_xlabel("batch size")
        draw_bars(axes, cells, std=std)
    add_legend(figure, axes, gpus=gpus_of(drawn))
    axes.set_ylabel(f"{what}, {unit}")
    axes.set_ylim(bottom=0)
    deviation = ", mean ± standard deviation" if std else ""
    set_title(figure, f"{title_of(rows)}: {what}{at_batch}{deviation}")
    unclutter(axes, grid="y" if len(batches) == 1 else "both")
    return figure


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
    axes.set_xlabel("batch size")
