"""Test accuracy against training time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.figure import Figure

from ampfuse.experiments.plots.drawing import (
    add_legend,
    line_styles,
    make_panels,
    rows_with,
    set_title,
    title_of,
    unclutter,
)
from ampfuse.experiments.plots.grouping import gpus_of, lines
from ampfuse.experiments.results import Row


def accuracy_against_time(rows: Sequence[Row], *, of: str = "iterations") -> Figure:
    """Test accuracy against training time, from the runs' logs; means over repeats.

    A panel per batch size and a line per GPU and method. Runs that were evaluated once, at their
    end, have one point each: these are joined over the batch sizes, in one panel.

    Raises:
        ResultsError: no run was evaluated, or a line would mix lengths.
    """
    courses = {id(row): _accuracy_course(row) for row in rows}
    rows = rows_with(rows, lambda row: courses[id(row)] and row.batch_size)
    drawn = lines(rows, of=of)
    batches = sorted({row.batch_size for row in rows if row.batch_size})
    once = len(batches) > 1 and all(len(courses[id(row)]) == 1 for row in rows)
    panels: list[int | None] = [None] if once else list(batches)
    figure, all_axes = make_panels(len(panels))
    styles = line_styles(drawn)
    for axes, batch in zip(all_axes, panels, strict=True):
        for line, style in zip(drawn, styles, strict=True):
            points = [
                point
                for row in line.rows
                if batch in (None, row.batch_size)
                for point in courses[id(row)]
            ]
            if points:
                seconds, percent = zip(*points, strict=True)
                axes.plot(seconds, percent, label=line.label, **style)
        if batch is not None and len(panels) > 1:
            axes.set_title(f"batch size {batch}", fontsize=9)
        axes.set(xlabel="training time, s", ylabel="test accuracy, %")
        axes.set_xlim(left=0)
        unclutter(axes)
    add_legend(figure, *all_axes, gpus=gpus_of(drawn))
    at_end = f" at the end, batch sizes {batches[0]} to {batches[-1]}" if once else ""
    alone = f", batch size {batches[0]}" if len(batches) == 1 else ""
    set_title(figure, f"{title_of(rows)}: test accuracy{at_end}{alone}")
    return figure


def _accuracy_course(row: Row) -> list[tuple[float, float]]:
    """Mean (training time in s, accuracy in %) of each evaluation."""
    by_step: dict[int, list[tuple[float, float]]] = {}
    for run in row.runs:
        for line in () if run.diverged else run.log("evaluation"):
            if line["test_accuracy"] is not None:
                point = (line["time_s"], 100 * line["test_accuracy"])
                by_step.setdefault(line["step"], []).append(point)
    return [
        (statistics.fmean(p[0] for p in points), statistics.fmean(p[1] for p in points))
        for points in by_step.values()
    ]
