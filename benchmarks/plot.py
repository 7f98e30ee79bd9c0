"""Draws a CSV that ``step.py`` or ``host_time.py`` wrote, as PNGs next to it.

    python benchmarks/plot.py [benchmarks/results/step_cpu.csv]

Bars (``<name>.png``): the time of each variant, with the 20th to 80th percentile. Roofline
(``<name>_roofline.png``, where the CSV counts bytes): bytes that a variant moves per parameter
against the bandwidth it reaches, under the bandwidth of copying.
"""

from __future__ import annotations

import math
import statistics
import sys
from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from harness import RESULTS, Row, read
from matplotlib.axes import Axes

_OURS, _PEERS = "#b5475a", "#c3cddd"  # dark and light, in grey too
_BOUNDS = ("copy", "limit")
_MARKERS = "osD^vPX*<>p"


def _where(row: Row) -> str:
    if row.device != "cpu":
        return row.device
    return f"{row.threads} thread{'s' * (row.threads > 1)}"


def draw_bars(axes: Axes, rows: list[Row]) -> None:
    """One case at one number of threads; the machine's limit is a line across the bars."""
    bars = [row for row in rows if row.variant not in _BOUNDS]
    for y, row in enumerate(bars):
        spread = [[row.median_ms - row.p20_ms], [row.p80_ms - row.median_ms]]
        color = _OURS if row.variant.startswith("ampfuse") else _PEERS
        axes.barh(y, row.median_ms, 0.75, xerr=spread, color=color, capsize=3)
        axes.annotate(
            f"{row.median_ms:.3g}",
            (max(row.p80_ms, row.median_ms), y),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    title = f"{rows[0].case}, {_where(rows[0])}: ms per step"
    for row in rows:
        if row.variant == "limit":
            axes.axvline(row.median_ms, color="black", linestyle="dashed", linewidth=1.2)
            title += f" (dashed: limit, {row.median_ms:.3g})"
    axes.set_yticks(range(len(bars)), [row.variant for row in bars], fontsize=8)
    axes.set_ylim(len(bars) - 0.4, -0.6)  # the first on top
    axes.margins(x=0.12)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def draw_roofline(axes: Axes, rows: list[Row]) -> None:
    """All cases at one number of threads: a point for each variant of each."""
    variants = [v for v in dict.fromkeys(row.variant for row in rows) if v not in _BOUNDS]
    for i, variant in enumerate(variants):
        points = [row for row in rows if row.variant == variant]
        axes.plot(
            [row.bytes_per_param for row in points],
            [row.gb_per_s for row in points],
            linestyle="",
            marker=_MARKERS[i % len(_MARKERS)],
            markersize=7,
            color=_OURS if variant == "ampfuse" else "white",
            markeredgecolor="black",
            label=variant,
            zorder=3,
        )
    copy = [row.gb_per_s for row in rows if row.variant == "copy"]
    roof = statistics.median(copy)
    axes.axhspan(min(copy), max(copy), color="#dddddd", zorder=0)
    axes.axhline(roof, color="black", label=f"copy bandwidth, {roof:.3g} GB/s")
    right = 1.08 * max(row.bytes_per_param for row in rows)
    top = 1.15 * max(*copy, *(row.gb_per_s for row in rows))
    _draw_times(axes, right, top)
    axes.set_xlim(0, right)
    axes.set_ylim(0, top)
    axes.set_xlabel("bytes moved per parameter (dotted: equal time per parameter)")
    axes.set_ylabel("GB/s")
    axes.set_title(_where(rows[0]), loc="left", fontsize=10, pad=18)
    axes.legend(loc="upper left", bbox_to_anchor=(1.12, 1), fontsize=8, frameon=False)


def _draw_times(axes: Axes, right: float, top: float) -> None:
    """Rays of equal time per parameter: bytes over bandwidth. Labelled where they leave."""
    diagonal = right / top  # nanoseconds
    decade = 10.0 ** math.floor(math.log10(diagonal / 4))
    for factor in (1, 2, 5, 10, 20, 50):
        ns = factor * decade
        if not diagonal / 4 <= ns <= diagonal * 4:
            continue
        x, y = min(right, ns * top), min(top, right / ns)
        axes.plot([0, x], [0, y], color="#999999", linewidth=0.7, linestyle="dotted", zorder=1)
        at_top = y >= top
        axes.annotate(
            f"{ns:.3g} ns" if ns >= 0.05 else f"{1e3 * ns:.3g} ps",
            (x, y),
            xytext=(0, 3) if at_top else (3, 0),
            textcoords="offset points",
            ha="center" if at_top else "left",
            va="bottom" if at_top else "center",
            fontsize=7,
            color="#555555",
            annotation_clip=False,
        )


def bars_of(rows: list[Row], path: Path) -> None:
    """A row of the picture for each case, a column for each number of threads."""
    cases = [list(group) for _, group in groupby(rows, key=lambda row: row.case)]
    threads = sorted({row.threads for row in rows})
    heights = [0.9 + 0.24 * len({row.variant for row in case}) for case in cases]
    figure, axes = plt.subplots(
        len(cases),
        len(threads),
        figsize=(6 * len(threads), sum(heights) + 0.5),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for line, case in zip(axes, cases, strict=True):
        for cell, count in zip(line, threads, strict=True):
            some = [row for row in case if row.threads == count]
            if some:
                draw_bars(cell, some)
            else:
                cell.set_visible(False)
    _save(figure, rows, path)


def roofline_of(rows: list[Row], path: Path) -> None:
    """A panel for each number of threads."""
    rows = [row for row in rows if not math.isnan(row.share_of_copy)]
    if not rows:
        return
    threads = sorted({row.threads for row in rows})
    figure, axes = plt.subplots(
        len(threads), 1, figsize=(8, 4.2 * len(threads)), squeeze=False, layout="constrained"
    )
    for cell, count in zip(axes.flat, threads, strict=True):
        draw_roofline(cell, [row for row in rows if row.threads == count])
    _save(figure, rows, path)


def _save(figure: plt.Figure, rows: list[Row], path: Path) -> None:
    row = rows[0]
    figure.suptitle(f"{row.hardware}, torch {row.torch}, {row.date}", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    print(path)


def main() -> None:
    """Draws both pictures."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "step_cpu.csv"
    rows = read(path)
    bars_of(rows, path.with_suffix(".png"))
    roofline_of(rows, path.with_name(f"{path.stem}_roofline.png"))


if __name__ == "__main__":
    main()
