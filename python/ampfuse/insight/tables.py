"""What the reports have in common: tables as text, numbers, and names of types."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """``"float16"`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def figures(value: float, count: int) -> str:
    """`value` with so many significant figures; large ones whole: ``"33.1"``, ``"1050"``."""
    return f"{value:.0f}" if value >= 10**count - 0.5 else f"{value:.{count}g}"


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
