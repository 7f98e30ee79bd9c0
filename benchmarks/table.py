"""Prints the table of docs/benchmarks.md from a CSV that ``step.py`` or ``host_time.py`` wrote.

python benchmarks/table.py [benchmarks/results/step_cpu.csv]
"""

from __future__ import annotations

import math
import sys
from itertools import groupby
from pathlib import Path

from harness import RESULTS, Row, read


def cells(case: str, rows: list[Row]) -> dict[str, str]:
    """One line of the table, by column: medians, with the 20th to 80th percentile."""
    by_variant = {row.variant: row for row in rows}
    ours, limit = by_variant["ampfuse"], by_variant.get("limit")
    torch_routes = [row for row in rows if row.variant.startswith("torch ")]
    best = min(torch_routes, key=lambda row: row.median_ms, default=None)
    others = [row for row in rows if row.peer]
    return {
        "step": case,
        "threads": str(ours.threads) if ours.device == "cpu" else "",
        "ampfuse, ms": _spread(ours),
        "the machine's limit, ms": _spread(limit) if limit else "",
        "ampfuse / limit": f"{ours.median_ms / limit.median_ms:.2f}" if limit else "",
        "share of copy bandwidth": ""
        if math.isnan(ours.share_of_copy)
        else f"{ours.share_of_copy:.0%} of {by_variant['copy'].gb_per_s:,.0f} GB/s",
        "fastest torch route, ms": f"{_spread(best)} {best.variant.removeprefix('torch ')}"
        if best
        else "",
        "ampfuse is faster by": f"**{_ratio(best, ours)}**" if best else "",
        "than others": ", ".join(f"{row.variant} {_ratio(row, ours)}" for row in others),
    }


def _ratio(theirs: Row, ours: Row) -> str:
    ratio = theirs.median_ms / ours.median_ms
    return f"{ratio:.1f}x" if ratio >= 1.2 else f"{ratio:.2f}x"


def _spread(row: Row) -> str:
    digits = 1 if row.median_ms >= 10 else 2 if row.median_ms >= 1 else 3
    values = (f"{value:.{digits}f}" for value in (row.median_ms, row.p20_ms, row.p80_ms))
    return "{} ({}-{})".format(*values)


def table(rows: list[Row]) -> str:
    """Markdown; without the columns that have nothing to say."""
    groups = groupby(rows, key=lambda row: (row.case, row.threads))
    lines = [cells(case, list(group)) for (case, _), group in groups]
    columns = [name for name in lines[0] if any(line[name] for line in lines)]
    text = [columns, *([line[column] for column in columns] for line in lines)]
    header, *body = ("| " + " | ".join(line) + " |" for line in text)
    return "\n".join([header, "|---" * len(columns) + "|", *body])


def main() -> None:
    """Prints the table and the conditions it was measured under."""
    rows = read(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "step_cpu.csv")
    print(table(rows))
    row = rows[0]
    peers = dict.fromkeys(row.peer for row in rows)
    conditions = [row.hardware, row.isa, f"torch {row.torch}", f"ampfuse {row.ampfuse}", *peers]
    count = min(row.n for row in rows)
    print(
        f"\n{', '.join(filter(None, [*conditions, row.date]))}. "
        f"Median of {count}{' or more' * any(row.n > count for row in rows)}, "
        "20th to 80th percentile."
    )


if __name__ == "__main__":
    main()
