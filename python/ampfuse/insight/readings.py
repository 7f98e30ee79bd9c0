"""What a metered step read of each tensor, which of it is wrong, and all of it as a table."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import torch

from ampfuse._schema import METER_COUNTS
from ampfuse.insight.reports import Finding, aligned, dtype_name


@dataclasses.dataclass(frozen=True)
class TensorReading:
    """One tensor in one metered step. In a skipped step, and of a tensor without a gradient, all
    counts are 0.

    Attributes:
        step: the optimizer's, from 1 when the meter was made, skipped ones included.
        parameter: its name.
        dtype: of the weight that the model computes with.
        has_master: whether it has an FP32 master.
        elements: how many weights were stepped.
        changed: weights whose bits changed.
        stale: weights of half precision whose update was not zero in FP32, and whose bits stayed:
            with a master the update is kept there, without one it is lost.
        zero, subnormal: elements of the gradient as the step found it (scaled, of the last backward
            pass) that are zero; that are not, and are below the smallest normal number of their
            type (2**-14 in float16, 2**-126 in bfloat16 and float32).
        update_norm, weight_norm: L2, of the step's change and of the weight after it, in FP32.
        exponents: of the gradient's elements, of 16 in each 1,024: how many are of magnitude
            2**-126 to 2**-122, 2**-122 to 2**-118, ..., with those below in the first of the 64
            bins, and inf and NaN in the last.
    """

    step: int
    parameter: str
    dtype: torch.dtype
    has_master: bool
    elements: int
    changed: int
    stale: int
    zero: int
    subnormal: int
    update_norm: float
    weight_norm: float
    exponents: tuple[int, ...]

    @property
    def stale_share(self) -> float:
        """Stale ones of the weights that were to move; NaN if none was."""
        return _ratio(self.stale, self.changed + self.stale)

    @property
    def subnormal_share(self) -> float:
        """Subnormal ones of the gradient elements that are not zero; NaN if all are."""
        return _ratio(self.subnormal, self.elements - self.zero)

    @property
    def update_ratio(self) -> float:
        """Norm of the update over norm of the weight."""
        return _ratio(self.update_norm, self.weight_norm)

    def shares(self) -> dict[str, float]:
        """Each count but `elements`, over that."""
        return {name: _ratio(getattr(self, name), self.elements) for name in METER_COUNTS[1:]}

    @property
    def is_lost(self) -> bool:
        """Nearly all updates round away, and no master keeps them."""
        return not self.has_master and self.stale_share >= 0.99


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


# Problems: the kind, when a tensor has it, what is said, and what helps. The first one counts.
# fmt: off
_RULES: tuple[tuple[str, Callable[[TensorReading], bool], str, str], ...] = (
    ("no gradient", lambda row: row.elements == 0, "no gradient",
     "the weight is not part of the loss, or frozen."),
    ("stale", lambda row: row.is_lost, "{row.stale_share:.0%} of the updates lost",
     "updates below half a step of the weight's type are lost. Keep the weight in FP32 "
     "(module.float(), or keep_batchnorm_fp32=True of amp.initialize), give the optimizer masters "
     "(master_weights=True; levels O2 and O5 have them), or raise the learning rate."),
    ("zero gradient", lambda row: row.zero == row.elements, "every element zero",
     "either nothing in the loss depends on the weight, or everything was below the smallest "
     "number of the gradient's type: then a larger loss scale or BF16 (levels O4, O5) helps."),
    # In float16 a normal distribution has 5 % there when its deviation is 16 times the smallest
    # normal number.
    ("underflow", lambda row: row.subnormal_share >= 0.05,
     "{row.subnormal_share:.0%} of the gradient subnormal and {zero:.0%} zero",
     "subnormal gradients lose digits. Use a dynamic loss scale, a larger one "
     "(init_scale=, loss_scale=), or BF16 (levels O4, O5)."),
)
# fmt: on


def find(readings: Iterable[TensorReading]) -> list[Finding]:
    """The problem of each tensor in its last reading. Skipped steps do not count."""
    readings = list(readings)
    applied = {row.step for row in readings if row.elements}
    rows_of: dict[str, list[TensorReading]] = {}
    for row in readings:
        if row.step in applied:
            rows_of.setdefault(row.parameter, []).append(row)
    found = []
    for name, rows in rows_of.items():
        rows = [row for row in rows if row.elements] or rows
        for kind, holds, text, remedy in _RULES:
            if holds(rows[-1]):
                *_, first = itertools.takewhile(holds, reversed(rows))
                said = text.format(row=rows[-1], zero=_ratio(rows[-1].zero, rows[-1].elements))
                found.append(Finding(kind, remedy, name, f"{said} since step {first.step}"))
                break
    return found


def _in_words(findings: Sequence[Finding]) -> str:
    """Each kind with its remedy, once, and below it where it was found; and how tensors get names,
    if they have none."""
    kinds: dict[tuple[str, str], dict[str, list[str]]] = {}
    for one in findings:
        kinds.setdefault((one.kind, one.remedy), {}).setdefault(one.found, []).append(one.where)
    lines = []
    for (kind, remedy), places in kinds.items():
        lines.append(f"- {kind}: {remedy}")
        lines += [f"  {found}: {', '.join(where)}" for found, where in places.items()]
    if any(one.where.startswith("param_groups[") for one in findings):
        lines.append(
            "For names, build the optimizer from model.named_parameters() or use amp.initialize."
        )
    return "\n".join(lines)


def report(readings: Sequence[TensorReading]) -> str:
    """The last applied step as a table, and all findings below it."""
    steps = [row.step for row in readings if row.elements]
    if not steps:
        skipped = " (all metered steps were skipped)" if readings else ""
        return f"The meter has no readings yet{skipped}."
    heads = ("parameter", "weights", "type", *METER_COUNTS[1:], "update/weight")
    lines: list[tuple[str, ...]] = [heads]
    for row in readings:
        if row.step == steps[-1]:
            kind = dtype_name(row.dtype) + (" + master" if row.has_master else "")
            shares = (f"{x:.2%}" if row.elements else "-" for x in row.shares().values())
            ratio = "-" if math.isnan(row.update_ratio) else f"{row.update_ratio:.1e}"
            lines.append((row.parameter, f"{row.elements:,}", kind, *shares, ratio))
    said = _in_words(find(readings)) or "No problem found."
    return "\n".join([f"Step {steps[-1]}", *aligned(lines, left=(0, 2)), "", said])
