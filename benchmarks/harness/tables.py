"""Markdown tables of rows that were measured; of optimizer steps, against peers and the machine's
limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter

from .results import Row

Group = dict[str, Row]  # the rows of one line, by variant
Columns = dict[str, Callable[[Group], str]]  # the cell of a line, by the header


def markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    header, *body = ("| " + " | ".join(line) + " |" for line in (columns, *lines))
    return [header, "|---" * len(columns) + "|", *body]


def table(head: str, groups: Iterable[tuple[str, Group]], columns: Columns) -> list[str]:
    """A line for each of the `groups`, which come with their labels; without empty columns."""
    labels, by_variant = zip(*groups, strict=True)
    cells = {header: [cell(group) for group in by_variant] for header, cell in columns.items()}
    cells = {header: texts for header, texts in cells.items() if any(texts)}
    return markdown([head, *cells], [*zip(labels, *cells.values(), strict=True)])


def spread(row: Row | None, digits: int | None = None) -> str:
    """Median, 20th and 80th percentile; "" of a row that is not there."""
    if row is None:
        return ""
    if digits is None:
        digits = 1 if row.median_ms >= 10 else 2 if row.median_ms >= 1 else 3
    median, low, high = (f"{ms:.{digits}f}" for ms in (row.median_ms, row.p20_ms, row.p80_ms))
    return f"{median} ({low}-{high})"


def conditions_of(rows: Sequence[Row], *, spread: bool = True) -> str:
    """Hardware, versions and date of the rows, and what a cell shows: the median, with or without
    the `spread`."""
    count = min(row.n for row in rows)
    columns = ("{hardware}", "{isa}", "torch {torch}", "ampfuse {ampfuse}", "{peer}", "{date}")
    values = dict.fromkeys(column.format(**vars(row)) for column in columns for row in rows)
    text = f"{', '.join(filter(None, values))}. Median of {count}"
    if any(row.n > count for row in rows):
        text += " or more"
    return f"{text}, 20th to 80th percentile." if spread else f"{text}."


# ---- optimizer steps -----------------------------------------------------------------------------


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
