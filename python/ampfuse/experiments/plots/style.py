"""How the figures look: colours, markers, dashes and hatches, legends, titles, bars.

Colour and marker are the GPU's, dash and filling the method's; with one GPU all four are the
method's. So lines can be told apart in black and white too, and bars by their hatches.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ampfuse.experiments.plots.lines import Line, gpus_of, varies
from ampfuse.experiments.results import Row, Stat

WIDTH = 7.0  # inches: a notebook's column
_SMALL = 8  # points: legends, numbers on bars


# Okabe and Ito's, told apart by colour-blind readers too.
_GPU_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_GPU_MARKERS = "os^DvPX<>*hpd8"


class _Look(NamedTuple):
    """What shows a method: ink and face (of bars), hatch, dash, marker and its filling."""

    ink: str
    face: str
    hatch: str
    dashes: tuple[float, ...]
    marker: str
    fill: str


_LOOKS = (
    _Look("#000000", "#FFFFFF", "", (), "o", "full"),
    _Look("#7F7F7F", "#D9D9D9", "----", (9, 3), "X", "right"),
    _Look("#E69F00", "#F5DFA0", "\\\\\\\\", (6, 1.5, 1, 1.5), "D", "bottom"),
    _Look("#8A6D3B", "#D2B9A0", "xxxx", (3, 1.3), "v", "top"),
    _Look("#56B4E9", "#C9E7F8", "||||", (1, 3), "p", "right"),
    _Look("#009E73", "#A8D8B9", "....", (1, 1.3), "^", "left"),
    _Look("#D55E00", "#F3B488", "////", (5, 2), "s", "white"),
    _Look("#CC79A7", "#E3C0D6", "oo", (9, 2, 3, 2), "P", "bottom"),
    _Look("#6A3D9A", "#CDB9E3", "++++", (6, 1.5, 1, 1.5, 1, 1.5), "<", "top"),
    _Look("#0072B2", "#9BC4E2", "//..", (5, 2, 1, 2, 1, 2, 1, 2), ">", "right"),
    # For whatever else there is: second loops, captured graphs, ...
    _Look("#B15928", "#E6CBB5", "**", (12, 2, 1, 2), "*", "full"),
    _Look("#1B5E20", "#B9CDB9", "OO", (2, 2, 6, 2), "h", "white"),
    _Look("#AD1457", "#EBC3D2", "\\\\..", (4, 4), "d", "left"),
    _Look("#455A64", "#C5CED2", "--..", (1, 5), "8", "full"),
)


# A method looks the same in every figure, and E1's names as their arms.
_LOOK_OF = {
    **{"fp32": 0, "tf32": 1, "amp-fp16": 2, "amp-bf16": 3},
    **{"O0": 4, "O1": 5, "O2": 6, "O3": 7, "O4": 8, "O5": 9},
    **{"FP32": 0, "FP16": 6, "fp16": 6, "amp": 5},
}


def _looks(names: Iterable[str]) -> dict[str, _Look]:
    """A look for each name; no two the same as long as there are enough."""
    names = list(dict.fromkeys(names))
    chosen: dict[str, int] = {}
    for name in names:
        if (wanted := _LOOK_OF.get(name)) is not None and wanted not in chosen.values():
            chosen[name] = wanted
    rest = (name for name in names if name not in chosen)
    free = [place for place in range(len(_LOOKS)) if place not in chosen.values()]
    free.sort(key=lambda place: place in _LOOK_OF.values())
    chosen |= zip(rest, itertools.cycle(free or range(len(_LOOKS))), strict=False)
    return {name: _LOOKS[chosen[name]] for name in names}


def line_styles(drawn: Sequence[Line]) -> list[dict[str, Any]]:
    gpus = gpus_of(drawn)
    looks = _looks(line.name for line in drawn)
    styles = []
    for line, more in zip(drawn, falling(len(drawn)), strict=True):
        look = looks[line.name]
        style = {"color": look.ink, "marker": look.marker, "dashes": look.dashes}
        style |= {"markersize": 5 + 2 * more, "linewidth": 1.2 + 0.8 * more}
        style |= {"markerfacecoloralt": "white"}
        style |= {"markerfacecolor" if look.fill == "white" else "fillstyle": look.fill}
        if len(gpus) > 1:
            gpu = gpus.index(line.gpu)
            style["color"] = _GPU_COLORS[gpu % len(_GPU_COLORS)]
            style["marker"] = _GPU_MARKERS[gpu % len(_GPU_MARKERS)]
        styles.append(style)
    return styles


def level_styles(names: Iterable[str]) -> list[dict[str, Any]]:
    """Colour and dashes of a line for each of different methods, without markers."""
    looks = _looks(names).values()
    return [{"color": look.ink, "dashes": look.dashes} for look in looks]


def falling(count: int) -> list[float]:
    """To 0, from 1: what is drawn first is larger, so that lines on top of each other all show."""
    return [(count - 1 - i) / max(1, count - 1) for i in range(count)]


def draw_bars(
    axes: Axes,
    cells: Mapping[tuple[Any, str], Stat | None],
    *,
    names: Sequence[str] | None = None,
    std: bool = False,
) -> None:
    """Bars in groups: `cells` has a value for (group, name), None for one that diverged."""
    groups = list(dict.fromkeys(group for group, _ in cells))
    looks = _looks(names or [name for _, name in cells])
    width = 0.84 / len(looks)
    inches = (WIDTH - 0.9) * width / len(groups)
    upright = {"fontsize": 6.5, "rotation": 90}
    longest = max((len(_brief(stat.mean)) for stat in cells.values() if stat), default=0)
    is_wide = inches > 0.075 * longest + 0.05
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # over the lines of the grid
    for place, (name, look) in enumerate(looks.items()):
        offset = (place - (len(looks) - 1) / 2) * width
        there = {x + offset: cells[g, name] for x, g in enumerate(groups) if (g, name) in cells}
        for x in (x for x, stat in there.items() if stat is None):
            method = name.split(" (")[0]
            axes.text(x, 0, f"  {method} diverged", ha="center", va="bottom", **upright)
        there = {x: stat for x, stat in there.items() if stat}
        if not there:
            continue
        bars = axes.bar(
            list(there),
            [stat.mean for stat in there.values()],
            width * 0.92,
            yerr=[stat.std or 0.0 for stat in there.values()] if std else None,
            capsize=2,
            error_kw={"elinewidth": 0.9},
            label=name,
            color=look.face,
            hatch=look.hatch,
            edgecolor="black",
            linewidth=0.7,
        )
        if inches > 0.11:
            letters = {"fontsize": _SMALL} if is_wide else upright
            axes.bar_label(bars, fmt=_brief, padding=2.5, bbox=paper, **letters)
    room = int(75 / len(groups))  # letters
    axes.set_xticks(range(len(groups)), [textwrap.fill(str(group), room) for group in groups])
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12 if is_wide else 0.25)  # room for the numbers


def _brief(value: float) -> str:
    """Three digits, or more where they stand before the point: 0.951, 12.3, 3437."""
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{digits}f}"


def make_panels(titles: Sequence[str | None], columns: int = 2) -> tuple[Figure, list[Axes]]:
    """A figure of so many axes, with their `titles` if there are several."""
    count = len(titles)
    columns = min(count, columns)
    lines_ = -(-count // columns)
    height = 3.8 if count == 1 else 0.5 + 2.5 * lines_
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    cells = list(figure.subplots(lines_, columns, squeeze=False).flat)
    for axes in cells[count:]:
        axes.remove()
    for axes, title in zip(cells, titles, strict=False):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        if count > 1:
            axes.set_title(textwrap.fill(title, 80 // columns), fontsize=9)
    return figure, cells[:count]


def finish(figure: Figure, *all_axes: Axes, gpus: Sequence[str], title: str) -> Figure:
    """`figure` with a title and a legend below the axes, where it hides nothing."""
    figure.suptitle(textwrap.fill(title, 84), fontsize=10)
    by_label: dict[str, Any] = {}
    for axes in all_axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            if len(gpus) == 1:
                label = label.removeprefix(f"{gpus[0]} ")
            by_label.setdefault(textwrap.fill(label, 44), handle)
    longest = max(len(part) for label in by_label for part in label.split("\n"))
    room = max(1, int((WIDTH - 0.2) / (0.068 * longest + 0.65)))  # inches that a label takes
    # Of several GPUs, each has a column.
    columns = min(room, len(by_label), 4, len(gpus) if len(gpus) > 1 else 4)
    tallest = max(label.count("\n") + 1 for label in by_label)
    lines_ = -(-len(by_label) // columns) * tallest + (len(gpus) == 1)
    figure.set_figheight(figure.get_figheight() + 0.17 * lines_)
    figure.legend(
        by_label.values(),
        by_label.keys(),
        title=textwrap.fill(gpus[0], 80) if len(gpus) == 1 else None,
        title_fontsize=_SMALL,
        loc="outside lower center",
        ncols=columns,
        fontsize=_SMALL,
        frameon=False,
        handlelength=3.6,
    )
    return figure


def title_of(rows: Sequence[Row]) -> str:
    """What was trained on what, and whose figures these are."""
    own = [row for row in rows if row.source == "measured"]
    model = rows[0].model
    if not own:
        return f"{model}, published figures"
    if varies(own, "data") or varies(own, "kind"):
        return model
    data, kind = own[0].conditions["data"], own[0].conditions.get("kind")
    return f"{model} on {f'synthetic {kind}' if data == 'synthetic' and kind else data}"
