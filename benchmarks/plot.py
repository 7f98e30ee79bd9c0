"""Draws a CSV that ``step.py`` wrote as bars, with the 20th to 80th percentile, next to it.

python benchmarks/plot.py [benchmarks/results/step_cpu.csv]
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from harness import RESULTS, Row, read
from matplotlib.axes import Axes

_OURS, _PEERS = "#d1495b", "#8d99ae"


def draw(axes: Axes, rows: list[Row]) -> None:
    """One case: a group of bars per thread count, and the limit as a line across the group."""
    variants = list(dict.fromkeys(row.variant for row in rows if row.variant != "limit"))
    width = 0.8 / len(variants)
    threads = sorted({row.threads for row in rows})
    for row in rows:
        group = threads.index(row.threads)
        if row.variant == "limit":
            axes.hlines(row.median_ms, group - 0.45, group + 0.45, "black", "dashed")
            axes.text(group + 0.45, row.median_ms, " limit", va="bottom", ha="right", fontsize=7)
            continue
        x = group + (variants.index(row.variant) - (len(variants) - 1) / 2) * width
        spread = [[row.median_ms - row.p20_ms], [row.p80_ms - row.median_ms]]
        color = _OURS if row.variant == "ampfuse" else _PEERS
        axes.bar(x, row.median_ms, 0.9 * width, yerr=spread, color=color, capsize=3)
        label = f"{row.variant.removeprefix('torch ')}\n{row.median_ms:.3g}"
        axes.text(x, row.p80_ms, label, ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(threads)), [f"{t} thread{'s' * (t > 1)}" for t in threads])
    axes.set_title(rows[0].case, fontsize=10)
    axes.set_ylabel("ms per step")
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draws all cases into one PNG."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "step_cpu.csv"
    rows = read(path)
    cases = list(dict.fromkeys(row.case for row in rows))
    lines = (len(cases) + 1) // 2
    figure, axes = plt.subplots(lines, 2, figsize=(11, 3 * lines), squeeze=False)
    for cell in axes.flat[len(cases) :]:
        cell.set_visible(False)
    for cell, case in zip(axes.flat, cases, strict=False):
        draw(cell, [row for row in rows if row.case == case])
    figure.suptitle(f"{rows[0].hardware}, torch {rows[0].torch}, {rows[0].date}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=150)
    print(path.with_suffix(".png"))


if __name__ == "__main__":
    main()
