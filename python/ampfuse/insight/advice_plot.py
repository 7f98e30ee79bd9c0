"""An advice as a picture: what the levels cost, and how far their losses are from that of FP32."""

from __future__ import annotations

from matplotlib.figure import Figure

from ampfuse.experiments.figures import colors_of
from ampfuse.insight.advice import Advice


def draw(advice: Advice) -> Figure:
    """Three panels over the levels that trained: time of a step (with its middle half), deviation
    from FP32 (with what is allowed), and the loss curves, over FP32's with other seeds.

    The recommended level's name is in bold; bars of levels with an objection are hatched.
    """
    rows = [row for row in advice.rows if row.failure is None]
    names = [row.level for row in rows]
    styles = [{"color": color} for color in colors_of(names).values()]
    figure = Figure(figsize=(10, 6), layout="constrained")
    panels = figure.subplot_mosaic([["time", "deviation"], ["loss", "loss"]])
    places = range(len(rows))
    colors = [style["color"] for style in styles]

    times = [row.median for row in rows]
    low, high = zip(*(row.quartiles for row in rows), strict=True)
    around = (
        [time - end for time, end in zip(times, low, strict=True)],
        [end - time for time, end in zip(times, high, strict=True)],
    )
    hatches = ["////" if row.objection else "" for row in rows]
    panels["time"].bar(
        places, times, yerr=around, capsize=3, color=colors, edgecolor="white", hatch=hatches
    )
    panels["time"].set_title("time of a step, ms (median, middle half)", fontsize=9)

    # O0's, which is 0, has no place on a logarithmic axis.
    panels["deviation"].scatter(
        places, [row.deviation or float("nan") for row in rows], c=colors, s=60
    )
    for place, row in enumerate(rows):
        ends = place - 0.45, place + 0.45
        label = "allowed" if place == 0 else None
        panels["deviation"].plot(ends, [row.allowed] * 2, color="black", lw=1.5, label=label)
    panels["deviation"].set_yscale("log")
    panels["deviation"].set_title("deviation of the loss from FP32", fontsize=9)
    panels["deviation"].legend(fontsize=8, frameon=False)

    for number, losses in enumerate(advice.seed_losses):
        label = None if number else "O0, other seeds"
        panels["loss"].plot(range(1, len(losses) + 1), losses, color="0.75", lw=3, label=label)
    for row, style in zip(rows, styles, strict=True):
        steps = range(1, len(row.losses) + 1)
        panels["loss"].plot(steps, row.losses, label=row.level, lw=1.2, **style)
    panels["loss"].set_title("loss", fontsize=9)
    panels["loss"].set_xlabel("step", fontsize=8)
    panels["loss"].legend(fontsize=8, frameon=False, ncols=2, loc="upper right")

    for name, axes in panels.items():
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25, linewidth=0.6, axis="both" if name == "loss" else "y")
        axes.set_axisbelow(True)
        if name != "loss":
            axes.set_xticks(places, [level.replace("-", "\n") for level in names])
            axes.get_xticklabels()[names.index(advice.level)].set_fontweight("bold")
    figure.suptitle(f"{advice.device}: train at {advice.level}", fontsize=10)
    return figure
