"""Markdown tables of rows that were measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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
