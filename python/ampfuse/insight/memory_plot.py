"""A memory report as a picture: what each mode holds, beside the budget."""

from __future__ import annotations

from matplotlib.figure import Figure

from ampfuse.experiments.figures import colors_of, finish, make_panels
from ampfuse.insight.memory import KINDS, MemoryReport, size


def draw(report: MemoryReport) -> Figure:
    """A bar for each mode, stacked by kind; what is only expected is hatched. The budget is a line,
    unless it is more than twice the highest bar; totals beyond it are bold.
    """
    places, totals = range(len(report.held)), [sum(held.values()) for held in report.held.values()]
    unit, name = (1e9, "GB") if max(totals) > 5e8 else (1e6, "MB")
    figure, (axes,) = make_panels([None])
    bottoms = [0.0] * len(totals)
    for kind, color in colors_of(KINDS).items():
        heights = [held[kind] / unit for held in report.held.values()]
        hatches = ["////" if (mode, kind) in report.expected else "" for mode in report.held]
        look = {"color": color, "edgecolor": "white", "hatch": hatches, "linewidth": 0.6}
        if any(heights):
            axes.bar(places, heights, 0.7, bottoms, label=kind, **look)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for place, top, total in zip(places, bottoms, totals, strict=True):
        weight = "bold" if total > report.budget else "normal"
        axes.text(place, top, f"{size(total)}\n", size=7, weight=weight, ha="center", va="center")
    if report.budget <= 2 * max(totals):
        axes.axhline(report.budget / unit, color="black", lw=1.2, ls="--", label="budget")
    axes.set_ylim(0, 1.05 * max(axes.get_ylim()[1], *bottoms))
    axes.set_ylabel(name)
    axes.set_xticks(places, [mode.replace("+", "\n+ ") for mode in report.held], fontsize=8)
    title = f"{report.heading}, budget {size(report.budget)} (hatched: expected)"
    return finish(figure, axes, gpus=[], title=title)
