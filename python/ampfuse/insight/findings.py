"""The one type of what reports find: what was measured, where, and what to do about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that is wrong, or that would pay.

    Attributes:
        kind: which rule found it, such as "stale" or "fused optimizer".
        remedy: what to do.
        where: the tensor; "" for a whole step.
        found: what was measured, in words.
        gain: how many times as fast a step gets by it; None if it is not about time.
    """

    kind: str
    remedy: str
    where: str = ""
    found: str = ""
    gain: float | None = None

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.found, self.remedy) if part)


def grouped(findings: Iterable[Finding]) -> str:
    """Each kind with its remedy, once, and below it where it was found."""
    kinds: dict[tuple[str, str], dict[str, list[str]]] = {}
    for one in findings:
        kinds.setdefault((one.kind, one.remedy), {}).setdefault(one.found, []).append(one.where)
    lines = []
    for (kind, remedy), places in kinds.items():
        lines.append(f"- {kind}: {remedy}")
        lines += [f"  {found}: {', '.join(where)}" for found, where in places.items()]
    return "\n".join(lines)
