"""The loss scale over the steps, and where steps were skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from ampfuse.experiments.plots.drawing import (
    add_legend,
    falling,
    line_styles,
    make_panels,
    rows_with,
    set_title,
    title_of,
    unclutter,
)
from ampfuse.experiments.plots.grouping import gpus_of, lines
from ampfuse.experiments.results import Row


def loss_scale(rows: Sequence[Row], *, of: str = "iterations") -> Figure:
    """Loss scale over steps, a cross at every overflow (a skipped step); a panel per batch size.

    Shown is the first repeat of each row that scales its loss. Lines that lie on each other are
    of different widths, so that all of them show.

    Raises:
        ResultsError: no run scaled its loss, or none has a log.
    """
    logs = {id(row): _scale_log(row) for row in rows}
    rows = rows_with(rows, lambda row: row.batch_size and _is_scaled(logs[id(row)]))
    drawn = lines(rows, of=of)
    batches = sorted({row.batch_size for row in rows if row.batch_size})
    figure, all_axes = make_panels(len(batches))
    for axes, batch in zip(all_axes, batches, strict=True):
        for line, style, more in zip(drawn, line_styles(drawn), falling(len(drawn)), strict=True):
            width = 1.2 + 3.6 * more
            for row in (row for row in line.rows if row.batch_size == batch):
                steps, scales, overflows = _scale_course(logs[id(row)])
                axes.plot(
                    steps,
                    scales,
                    drawstyle="steps-pre",
                    linewidth=width,
                    color=style["color"],
                    dashes=style["dashes"],
                    label=line.label,
                )
                if overflows:
                    axes.plot(*zip(*overflows, strict=True), **_CROSS)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_minor_locator(NullLocator())
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, high / 16), high * 2)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.set(xlabel="step", ylabel="loss scale, factor")
        if len(batches) > 1:
            axes.set_title(f"batch size {batch}", fontsize=9)
        unclutter(axes)
    all_axes[0].plot([], [], **_CROSS, label="overflow, step skipped")
    add_legend(figure, *all_axes, gpus=gpus_of(drawn))
    alone = f", batch size {batches[0]}" if len(batches) == 1 else ""
    set_title(figure, f"{title_of(rows)}: loss scale{alone}")
    return figure


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


def _scale_course(
    log: Sequence[Mapping[str, Any]],
) -> tuple[list[int], list[float], list[tuple[int, float]]]:
    """Steps and scales, and the steps of overflows, each at the scale that stands there."""
    steps = [0, *(line["step"] for line in log)]
    scales = [log[0]["loss_scale"], *(line["loss_scale"] for line in log)]
    overflows = [(step, line["loss_scale"]) for line in log for step in line["overflow_steps"]]
    return steps, scales, overflows
