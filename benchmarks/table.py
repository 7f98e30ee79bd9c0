"""Prints the README's table from a CSV that ``step.py`` wrote.

python benchmarks/table.py [benchmarks/results/step_cpu.csv]
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from harness import RESULTS, Row, read

_HEADER = (
    "| step | threads | ampfuse, ms | the machine's limit, ms | ampfuse / limit "
    "| fastest torch route, ms | ampfuse is faster by |\n|---|---|---|---|---|---|---|"
)


def line(case: str, threads: int, rows: list[Row]) -> str:
    """The table's line for one case: medians, with the 20th to 80th percentile."""
    by_variant = {row.variant: row for row in rows}
    ours = by_variant.pop("ampfuse")
    limit = by_variant.pop("limit", None)
    best = min(by_variant.values(), key=lambda row: row.median_ms)
    cells = [
        case,
        str(threads),
        _spread(ours),
        _spread(limit) if limit else "",
        f"{ours.median_ms / limit.median_ms:.2f}" if limit else "",
        f"{_spread(best)} {best.variant.removeprefix('torch ')}",
        f"**{best.median_ms / ours.median_ms:.1f}x**",
    ]
    return "| " + " | ".join(cells) + " |"


def _spread(row: Row) -> str:
    digits = 1 if row.median_ms >= 10 else 2
    values = (f"{value:.{digits}f}" for value in (row.median_ms, row.p20_ms, row.p80_ms))
    return "{} ({}-{})".format(*values)


def main() -> None:
    """Prints the table and the conditions it was measured under."""
    rows = read(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "step_cpu.csv")
    print(_HEADER)
    for (case, threads), group in groupby(rows, key=lambda row: (row.case, row.threads)):
        print(line(case, threads, list(group)))
    row = rows[0]
    conditions = [row.hardware, row.isa, f"torch {row.torch}", f"ampfuse {row.ampfuse}", row.date]
    print(f"\n{', '.join(filter(None, conditions))}. Median of {row.n}, 20th to 80th percentile.")


if __name__ == "__main__":
    main()
