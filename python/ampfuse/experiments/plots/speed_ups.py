"""How many times FP32's speed each method has."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from matplotlib.figure import Figure

from ampfuse.experiments.plots.drawing import (
    WIDTH,
    add_legend,
    draw_bars,
    rows_with,
    set_title,
    title_of,
    unclutter,
)
from ampfuse.experiments.plots.grouping import USUAL, NothingToDraw, lines
from ampfuse.experiments.results import Row, Stat


def speedup(rows: Sequence[Row], *, of: str = "iterations") -> Figure:
    """How many times as fast as FP32 each method is: bars per batch size, a panel per GPU.

    Compared are mean times per iteration. All bars of a GPU and batch size have one yardstick, the
    tuned FP32 run on the same data, without graph or compilation if there is such a one; O0 where
    FP32 was not run. The axis names it. Where a row diverged, that stands in the bar's place.

    Raises:
        ResultsError: no method has an FP32 to be compared with.
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
    figure = Figure(figsize=(WIDTH, 1.4 + 2.2 * len(cells)), layout="constrained")
    panels = figure.subplots(len(cells), 1, squeeze=False)[:, 0]
    shown = {name for of_gpu in cells.values() for _, name in of_gpu}
    names = [line.name for line in drawn if line.name in shown]
    for axes, (gpu, of_gpu) in zip(panels, cells.items(), strict=True):
        axes.axhline(1.0, color="black", linewidth=0.8, zorder=0.9)  # behind the bars
        draw_bars(axes, dict(sorted(of_gpu.items())), names=names)
        if len(cells) > 1:
            axes.set_title(textwrap.fill(gpu, 80), fontsize=9)
        axes.set_ylabel(textwrap.fill(f"speed, times {' or '.join(dict.fromkeys(bases))}", 32))
        unclutter(axes, grid="y")
    panels[-1].set_xlabel("batch size")
    add_legend(figure, *panels, gpus=list(cells))
    set_title(figure, f"{title_of(rows)}: speed-up of the training step")
    return figure


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
