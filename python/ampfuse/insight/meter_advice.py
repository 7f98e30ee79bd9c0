"""What the meter's readings say in words, and as a table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ampfuse.insight.words import aligned, dtype_name

if TYPE_CHECKING:
    from ampfuse.insight.meter import TensorReading

# Of the weights that were to move, so many stayed.
_STALE = 0.99
# Of the gradient elements that are not zero, so many are subnormal. (In float16 a normal
# distribution has 5 % of them there when its deviation is 16 times the smallest normal number.)
_UNDERFLOWS = 0.05


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is wrong with one tensor.

    Attributes:
        kind: "stale", "underflow", "zero gradient" or "no gradient".
        parameter: its name.
        since: the metered step since which it has been so, without interruption.
        text: what it means, and what to do.
    """

    kind: str
    parameter: str
    since: int
    text: str

    def __str__(self) -> str:
        return f"{self.parameter}: {self.text}"


def is_stale(row: TensorReading) -> bool:
    """Updates are lost: nearly all round away, and no master keeps them."""
    return not row.has_master and row.stale_share >= _STALE


def _underflows(row: TensorReading) -> bool:
    return row.subnormal_share >= _UNDERFLOWS


def _is_zero(row: TensorReading) -> bool:
    return row.zero == row.elements


def findings(readings: Iterable[TensorReading]) -> list[Finding]:
    """Of each tensor what holds in its last reading. Steps that were skipped say nothing."""
    rows_of: dict[str, list[TensorReading]] = {}
    applied = {row.step for row in readings if row.elements}
    for row in readings:
        if row.step in applied:
            rows_of.setdefault(row.parameter, []).append(row)
    found = []
    for name, rows in rows_of.items():
        stepped = [row for row in rows if row.elements]
        if not stepped:
            text = f"no gradient since step {rows[0].step}: it is not part of the loss, or frozen."
            found.append(Finding("no gradient", name, rows[0].step, text))
        elif is_stale(stepped[-1]):
            found.append(stale(stepped))
        elif _is_zero(stepped[-1]):
            since = _since(stepped, _is_zero)
            found.append(Finding("zero gradient", name, since, _zero_text(stepped[-1], since)))
        elif _underflows(stepped[-1]):
            since = _since(stepped, _underflows)
            found.append(Finding("underflow", name, since, _underflow_text(stepped[-1], since)))
    return found


def _since(rows: Sequence[TensorReading], holds: Callable[[TensorReading], bool]) -> int:
    since = rows[-1].step
    for row in reversed(rows):
        if not holds(row):
            break
        since = row.step
    return since


def stale(rows: Sequence[TensorReading]) -> Finding:
    """The finding of a tensor whose last reading is stale."""
    row, since = rows[-1], _since(rows, is_stale)
    text = (
        f"{row.stale_share:.0%} of its updates are below half a step of {dtype_name(row.dtype)} "
        f"since step {since}, and are lost. Keep it in FP32 (module.float(), or "
        "keep_batchnorm_fp32=True of amp.initialize), give the optimizer masters "
        "(master_weights=True; levels O2 and O5 have them), or raise its learning rate."
    )
    return Finding("stale", row.parameter, since, text)


def _underflow_text(row: TensorReading, since: int) -> str:
    return (
        f"{row.subnormal_share:.0%} of its gradient is subnormal since step {since}, where digits "
        f"are missing, and {row.zero / row.elements:.0%} is zero. Use a dynamic loss scale, a "
        "larger one (init_scale=, loss_scale=), or BF16 (levels O4, O5)."
    )


def _zero_text(row: TensorReading, since: int) -> str:
    return (
        f"its gradient has been zero in every element since step {since}. Either nothing in the "
        "loss depends on it, or everything was below the smallest number of the gradient's type: "
        "then a larger loss scale or BF16 (levels O4, O5) helps."
    )


_COLUMNS = ("weights", "type", "changed", "stale", "zero", "subnormal", "update/weight")


def report(readings: Sequence[TensorReading]) -> str:
    """The last applied step as a table, and all findings below it."""
    steps = [row.step for row in readings if row.elements]
    if not steps:
        skipped = " (all metered steps were skipped)" if readings else ""
        return f"The meter has read nothing yet{skipped}."
    rows = [row for row in readings if row.step == steps[-1]]
    lines: list[tuple[str, ...]] = [("parameter", *_COLUMNS)]
    for row in rows:
        kind = dtype_name(row.dtype) + (" + master" if row.has_master else "")
        cells = (row.changed, row.stale, row.zero, row.subnormal)
        shares = (f"{cell / row.elements:.2%}" if row.elements else "-" for cell in cells)
        ratio = "-" if math.isnan(row.update_ratio) else f"{row.update_ratio:.1e}"
        lines.append((row.parameter, f"{row.elements:,}", kind, *shares, ratio))
    said = [f"- {finding}" for finding in findings(readings)] or ["Nothing to be said against it."]
    return "\n".join([f"Step {steps[-1]}", *aligned(lines, left=(0, 2)), "", *said])
