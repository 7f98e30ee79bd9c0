"""What the meter's readings say in words, and as a table."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ampfuse.insight.words import aligned, dtype_name

if TYPE_CHECKING:
    from ampfuse.insight.meter import TensorReading

# Of the weights that were to move, so many stayed.
_STALE = 0.99
# Of the gradient elements that are not zero, so many are subnormal. (In float16 a normal
# distribution has 5 % of them there when its deviation is 16 times the smallest normal number.)
_UNDERFLOWS = 0.05


# What a kind of finding means, and what to do.
_REMEDIES = {
    "stale": "updates below half a step of the weight's type are lost. Keep the weight in FP32 "
    "(module.float(), or keep_batchnorm_fp32=True of amp.initialize), give the optimizer masters "
    "(master_weights=True; levels O2 and O5 have them), or raise the learning rate.",
    "underflow": "where a gradient is subnormal, digits are missing. Use a dynamic loss scale, a "
    "larger one (init_scale=, loss_scale=), or BF16 (levels O4, O5).",
    "zero gradient": "either nothing in the loss depends on the weight, or everything was below "
    "the smallest number of the gradient's type: then a larger loss scale or BF16 (levels O4, O5) "
    "helps.",
    "no gradient": "the weight is not part of the loss, or frozen.",
}
_NO_NAMES = "For names, build the optimizer from model.named_parameters() or use amp.initialize."


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is wrong with one tensor.

    Attributes:
        kind: "stale", "underflow", "zero gradient" or "no gradient".
        parameter: its name.
        since: the metered step since which it has been so, without interruption.
        found: what the last reading showed.
    """

    kind: str
    parameter: str
    since: int
    found: str

    def __str__(self) -> str:
        return f"{self.parameter}: {self.found} since step {self.since}: {_REMEDIES[self.kind]}"


def is_stale(row: TensorReading) -> bool:
    """Updates are lost: nearly all round away, and no master keeps them."""
    return not row.has_master and row.stale_share >= _STALE


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
            found.append(Finding("no gradient", name, rows[0].step, "no gradient"))
            continue
        row = stepped[-1]
        zero = f"{row.zero / row.elements:.0%} zero"
        tiny = f"{row.subnormal_share:.0%} of the gradient subnormal and {zero}"
        for kind, holds, text in (
            ("stale", is_stale, f"{row.stale_share:.0%} of the updates lost"),
            ("zero gradient", lambda row: row.zero == row.elements, "every element zero"),
            ("underflow", lambda row: row.subnormal_share >= _UNDERFLOWS, tiny),
        ):
            if holds(row):
                *_, first = itertools.takewhile(holds, reversed(stepped))
                found.append(Finding(kind, name, first.step, text))
                break
    return found


def in_words(found: Sequence[Finding]) -> str:
    """Each kind of finding with its remedy, once, and below it the tensors."""
    lines: dict[str, dict[str, list[str]]] = {}
    for one in found:
        told = f"{one.found} since step {one.since}"
        lines.setdefault(one.kind, {}).setdefault(told, []).append(one.parameter)
    said = []
    for kind, tensors in lines.items():
        said.append(f"- {kind}: {_REMEDIES[kind]}")
        said += [f"  {told}: {', '.join(names)}" for told, names in tensors.items()]
    unnamed = any(one.parameter.startswith("param_groups[") for one in found)
    return "\n".join(said + [_NO_NAMES] * unnamed)


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
    said = in_words(findings(readings)) or "Nothing to be said against it."
    return "\n".join([f"Step {steps[-1]}", *aligned(lines, left=(0, 2)), "", said])
