"""How the pictures of reports look; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's, told apart by colour-blind readers too, and two greys for longer lists.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#7F7F7F")


def panels(rows: list[list[str]], size: tuple[float, float]) -> tuple[Figure, dict[str, Axes]]:
    """A figure of `size` inches, and its axes by title; a title that is repeated spans its cells.

    Draw into ``axes[title]``, then call :func:`finish`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes: dict[str, Axes] = figure.subplot_mosaic(rows)  # type: ignore[arg-type]
    for title, each in axes.items():
        each.set_title(title, fontsize=9)
        each.tick_params(labelsize=8)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def bar_style(color: int, hatched: list[bool]) -> dict[str, Any]:
    """Bars of one colour, some of them hatched."""
    hatches = ["////" if each else "" for each in hatched]
    return {"color": COLORS[color % len(COLORS)], "edgecolor": "white", "hatch": hatches}


def finish(figure: Figure, title: str, path: str | Path | None) -> Figure:
    """Legends where there is something to explain, the title, and the file if one is named."""
    for axes in figure.axes:
        if axes.get_legend_handles_labels()[1]:
            axes.legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=10)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
