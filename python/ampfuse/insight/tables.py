"""What the reports have in common: tables as text and for pandas, and names of types."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pandas


def dtype_name(dtype: torch.dtype) -> str:
    """``"float16"`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def aligned(lines: Sequence[Sequence[str]], *, left: Container[int]) -> list[str]:
    """Lines of cells as text: the columns of `left` begin alike, the others end alike."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def frame(rows: Iterable[Any], *properties: str) -> pandas.DataFrame:
    """A pandas row for each of `rows`, dataclasses: their fields, and these properties."""
    import pandas

    return pandas.DataFrame(
        [
            dataclasses.asdict(row) | {name: getattr(row, name) for name in properties}
            for row in rows
        ]
    )
