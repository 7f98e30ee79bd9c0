"""Tables of optimizer steps, against peers and the machine's limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter

from .results import Row
from .tables import Columns, Group, spread, table


def best_of_torch(group: Group) -> Row | None:
    routes = [row for name, row in group.items() if name.startswith("torch ")]
    return min(routes, key=attrgetter("median_ms"), default=None)


def ratio(theirs: Row | None, group: Group) -> str:
    """Their time over ampfuse's."""
    if theirs is None:
        return ""
    value = theirs.median_ms / group["ampfuse"].median_ms
    return f"{value:.1f}x" if value >= 1.2 else f"{value:.2f}x"


def _over_limit(group: Group) -> str:
    limit = group.get("limit")
    return f"{group['ampfuse'].median_ms / limit.median_ms:.2f}" if limit else ""


def _share_of_copy(group: Group) -> str:
    share = group["ampfuse"].share_of_copy
    return "" if math.isnan(share) else f"{share:.0%} of {group['copy'].gb_per_s:,.0f} GB/s"


def _fastest_route(group: Group) -> str:
    best = best_of_torch(group)
    return f"{spread(best)} {best.variant.removeprefix('torch ')}" if best else ""


STEPS: Columns = {
    "threads": lambda by: str(by["ampfuse"].threads) if by["ampfuse"].device == "cpu" else "",
    "ampfuse, ms": lambda by: spread(by["ampfuse"]),
    "the machine's limit, ms": lambda by: spread(by.get("limit")),
    "ampfuse / limit": _over_limit,
    "share of copy bandwidth": _share_of_copy,
    "fastest torch route, ms": _fastest_route,
    "ampfuse is faster by": lambda by: (gain := ratio(best_of_torch(by), by)) and f"**{gain}**",
    "than others": lambda by: ", ".join(
        f"{name} {ratio(row, by)}" for name, row in by.items() if row.peer
    ),
}


def _grouped(rows: Sequence[Row]) -> list[Group]:
    groups = groupby(rows, key=attrgetter("case", "threads"))
    return [{row.variant: row for row in group} for _, group in groups]


def steps_table(rows: Sequence[Row]) -> list[str]:
    """The cases that ampfuse has a row of."""
    groups = [by for by in _grouped(rows) if "ampfuse" in by]
    return table("step", [(by["ampfuse"].case, by) for by in groups], STEPS)


def variants_table(rows: Sequence[Row]) -> list[str]:
    """A column for each variant: milliseconds, and the share of copy bandwidth."""

    def cell(variant: str, by: Group) -> str:
        row = by.get(variant)
        share = "" if row is None or math.isnan(row.share_of_copy) else f", {row.share_of_copy:.0%}"
        return spread(row) + share

    several = len({row.threads for row in rows}) > 1
    groups = []
    for by in _grouped(rows):
        row = next(iter(by.values()))
        groups.append((f"{row.case}, {row.threads} threads" if several else row.case, by))
    return table("ms", groups, {row.variant: partial(cell, row.variant) for row in rows})
