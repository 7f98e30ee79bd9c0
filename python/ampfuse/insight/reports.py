"""What the reports have in common: findings, tables as text, numbers, and names of types."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence

import torch


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is wrong, or that would pay.

    Attributes:
        kind: which rule found it, such as "stale" or "fused optimizer".
        suggestion: what to do.
        where: the tensor; "" for a whole step.
        found: what was measured, in words.
        gain: how many times as fast a step gets by it; None if it is not about time.
    """

    kind: str
    suggestion: str
    where: str = ""
    found: str = ""
    gain: float | None = None

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.found, self.suggestion) if part)


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
