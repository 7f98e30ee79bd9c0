"""The meter's readings as a picture: which tensors stand still, and whose gradients underflow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from ampfuse.insight import meter_advice as advice
from ampfuse.insight.meter import TensorReading


def draw(readings: Sequence[TensorReading]) -> Figure:
    """One line a tensor, one column a metered step, three panels.

    Lost: updates that rounded away (of tensors without a master; with one they are kept, and the
    line is empty). Underflow: subnormal shares of the gradients. Rate: norm of the update over norm
    of the weight. Tensors that the advice names are in bold.

    Raises:
        ValueError: there is no reading.
    """
    if not readings:
        raise ValueError("the meter has read nothing yet: optimizer.meter(every=...), then train")
    names = list(dict.fromkeys(row.parameter for row in readings))
    steps = list(dict.fromkeys(row.step for row in readings))
    at = {(row.parameter, row.step): row for row in readings}

    def grid(value: Callable[[TensorReading], float]) -> list[list[float]]:
        missing = math.nan
        return [
            [value(at[name, step]) if (name, step) in at else missing for step in steps]
            for name in names
        ]

    lost = grid(lambda row: math.nan if row.has_master else row.stale_share)
    subnormal = grid(lambda row: row.subnormal_share)
    rate = grid(lambda row: row.update_ratio or math.nan)
    panels = (
        ("updates lost to rounding", lost, "Reds", Normalize(0, 1)),
        ("subnormal gradients", subnormal, "Purples", Normalize(0, 1)),
        ("|update| / |weight|", rate, "viridis", LogNorm()),
    )
    figure = Figure(figsize=(9, 1.6 + 0.17 * len(names)), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True)
    for ax, (title, cells, colours, norm) in zip(axes, panels, strict=True):
        image = ax.imshow(cells, aspect="auto", interpolation="nearest", cmap=colours, norm=norm)
        ax.set_facecolor("0.93")  # where there is nothing to say
        ax.set_title(title, fontsize=9)
        places = sorted({0, (len(steps) - 1) // 2, len(steps) - 1})
        ax.set_xticks(places, [str(steps[place]) for place in places], fontsize=7)
        ax.set_xlabel("step", fontsize=8)
        bar = figure.colorbar(image, ax=ax, location="bottom", pad=0.02)
        bar.ax.tick_params(labelsize=7)
    named = {finding.parameter for finding in advice.findings(readings)}
    axes[0].set_yticks(range(len(names)), names, fontsize=7)
    for label, name in zip(axes[0].get_yticklabels(), names, strict=True):
        label.set_fontweight("bold" if name in named else "normal")
    return figure
