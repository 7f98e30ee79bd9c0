"""The meter: counts of lost updates and gradient underflow for each tensor, step by step.

A metered step is an ordinary one, with the same bits, that counts while it updates. The counts go
to the host in the background; only reading them synchronizes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ampfuse._schema import METER_COUNTS, UPDATE_FACTOR
from ampfuse.insight.reporting import Finding, aligned, dtype_name
from ampfuse.optim.fused import is_fused
from ampfuse.torch_utils import HALF_DTYPES, Sample, is_captured

if TYPE_CHECKING:
    from ampfuse._C import ParamTable
    from ampfuse.optim.base import AmpOptimizer


@dataclasses.dataclass(frozen=True)
class TensorReading:
    """One tensor in one metered step. All counts are 0 if the step was skipped, or if the tensor
    has no gradient.

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


class Meter:
    """``optimizer.meter``; switched on by calling it. One for each optimizer.

    Graphed steps are not metered, nor are those of an optimizer that is not ours.
    """

    def __init__(self, optimizer: AmpOptimizer) -> None:
        self._optimizer = optimizer
        self._every: int | None = None
        self._steps = self._start = 0  # so far, and at the last call
        self._keeps_bits = False
        self._records: deque[_Record] = deque()

    def __call__(
        self, every: int | None = 100, *, changed_bits: bool = False, history: int = 100
    ) -> Meter:
        """Meter the next step and every `every`-th after it.

        Arguments:
            every: None switches the meter off; what was read stays.
            changed_bits: also keep a bit for each weight that changed, of the last metered step;
                see :meth:`changed`.
            history: how many metered steps to keep, on the host (284 bytes a tensor each).

        Raises:
            TypeError: the optimizer steps by itself (it is not one of ampfuse's fused ones).
            ValueError: `every` or `history` is not positive.
        """
        if not is_fused(self._optimizer):
            raise TypeError(
                f"{type(self._optimizer).__name__} has a custom step(), and the meter only works "
                "with fused ones. Use SGD, Adam, AdamW, Adagrad, LAMB, NovoGrad, Lion or Muon."
            )
        for name, value in (("every", every), ("history", history)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        self._start, self._every = self._steps, every
        self._keeps_bits = changed_bits
        self._records = deque(self._records, maxlen=history)
        return self

    # --- around a step --------------------------------------------------------------------------

    def before_update(self, table: ParamTable) -> list[Tensor] | None:
        """The buffers that the coming step fills; None if it is not metered."""
        self._steps += 1
        if self._every is None or (self._steps - 1 - self._start) % self._every:
            return None
        return None if is_captured(table.param(0)) else table.plan.new_meter(self._keeps_bits)

    def after_update(self, table: ParamTable, buffers: list[Tensor]) -> None:
        """Start copying the counts of the step to the host."""
        self._records.append(_Record(self._steps, table, buffers))

    # --- reading --------------------------------------------------------------------------------

    @property
    def readings(self) -> list[TensorReading]:
        """The readings of all metered steps that are kept, in order. Synchronizes."""
        return [row for record in self._records for row in record.rows]

    @property
    def advice(self) -> list[Finding]:
        """The problem of each tensor in its last reading, with a suggestion. Synchronizes.

        Skipped steps do not count.
        """
        readings = self.readings
        applied = {row.step for row in readings if row.elements}
        rows_of: dict[str, list[TensorReading]] = {}
        for row in readings:
            if row.step in applied:
                rows_of.setdefault(row.parameter, []).append(row)
        findings = (_find(name, rows) for name, rows in rows_of.items())
        return [finding for finding in findings if finding is not None]

    def report(self) -> str:
        """A table of the last metered step that was applied, and the advice."""
        readings = self.readings
        steps = [row.step for row in readings if row.elements]
        if not steps:
            skipped = " (all metered steps were skipped)" if readings else ""
            return f"The meter has no readings yet{skipped}."
        heads = ("parameter", "weights", "type", *METER_COUNTS[1:], "update/weight")
        cells = [_cells(row) for row in readings if row.step == steps[-1]]
        said = _as_text(self.advice) or "No problem found."
        return "\n".join([f"Step {steps[-1]}", *aligned([heads, *cells], left=(0, 2)), "", said])

    def changed(self, parameter: str) -> Tensor:
        """Find the weights of `parameter` that changed their bits in the last metered step.

        Returns:
            bool, of the parameter's shape, on its device.

        Raises:
            KeyError: no such parameter.
            RuntimeError: nothing was metered with ``changed_bits``.
        """
        if not self._records or self._records[-1].changed_bits is None:
            raise RuntimeError(
                "no metered step has recorded which weights changed; turn that on with "
                "optimizer.meter(changed_bits=True)"
            )
        return self._records[-1].changed(parameter)


class _Record:
    """The counts of one metered step."""

    def __init__(self, step: int, table: ParamTable, buffers: Sequence[Tensor]) -> None:
        self.step, self.table = step, table
        self.row_count = len(buffers[0])
        self.sample = Sample(*buffers[:2])
        self.changed_bits = buffers[2] if len(buffers) > 2 else None

    @cached_property
    def rows(self) -> list[TensorReading]:
        return [self.row(row) for row in range(self.row_count)]

    def row(self, row: int) -> TensorReading:
        counts, norms = self.sample.tensors()
        values = [value & 0xFFFFFFFF for value in counts[row].tolist()]  # they are unsigned
        counted = dict(zip(METER_COUNTS, values, strict=False))
        update, weight_norm = norms[:, row].tolist()
        param, model = self.table.param(row), self.table.model(row)
        dtype = (param if model is None else model).dtype
        if dtype not in HALF_DTYPES:
            counted["stale"] = 0
        return TensorReading(
            step=self.step,
            parameter=self.table.name(row),
            dtype=dtype,
            has_master=model is not None,
            **counted,
            update_norm=update / UPDATE_FACTOR,
            weight_norm=weight_norm,
            exponents=tuple(values[len(METER_COUNTS) :]),
        )

    def changed(self, parameter: str) -> Tensor:
        names = [reading.parameter for reading in self.rows]
        if parameter not in names:
            known = ", ".join(names[:3])
            raise KeyError(f"there is no parameter {parameter!r}; the parameters are {known}, ...")
        row = names.index(parameter)
        param = self.table.param(row)
        if not self.rows[row].elements:  # not stepped: its bits mean nothing
            return torch.zeros_like(param, dtype=torch.bool)
        assert self.changed_bits is not None
        chunk = 8 * self.changed_bits.shape[1]
        first = sum(-(-self.table.param(i).numel() // chunk) for i in range(row))
        bits = self.changed_bits[first : first - (-param.numel() // chunk)].flatten()
        places = torch.arange(8, dtype=torch.uint8, device=bits.device)
        flat = (bits[:, None] >> places & 1).flatten()[: param.numel()].bool()
        # The bits are in memory order, so the mask has the parameter's strides.
        return torch.empty_like(param, dtype=torch.bool).set_(
            flat.untyped_storage(), 0, param.shape, param.stride()
        )


# --- findings -------------------------------------------------------------------------------------

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
    # 5 % of a normal distribution are subnormal in float16 if its deviation is 16 times the
    # smallest normal number.
    ("underflow", lambda row: row.subnormal_share >= 0.05,
     "{row.subnormal_share:.0%} of the gradient subnormal and {zero:.0%} zero",
     "subnormal gradients lose digits. Use a dynamic loss scale, a larger one "
     "(init_scale=, loss_scale=), or BF16 (levels O4, O5)."),
)
# fmt: on


def _find(name: str, rows: list[TensorReading]) -> Finding | None:
    """The problem in the last of the readings of one tensor, and since which step it has it."""
    rows = [row for row in rows if row.elements] or rows
    for kind, applies, text, suggestion in _RULES:
        if applies(rows[-1]):
            *_, first = itertools.takewhile(applies, reversed(rows))
            said = text.format(row=rows[-1], zero=_ratio(rows[-1].zero, rows[-1].elements))
            return Finding(kind, suggestion, name, f"{said} since step {first.step}")
    return None


def _as_text(findings: Sequence[Finding]) -> str:
    """Each kind with its suggestion, once, and below it where it was found; and how tensors without
    names get some."""
    kinds: dict[tuple[str, str], dict[str, list[str]]] = {}
    for one in findings:
        kinds.setdefault((one.kind, one.suggestion), {}).setdefault(one.found, []).append(one.where)
    lines = []
    for (kind, suggestion), places in kinds.items():
        lines.append(f"- {kind}: {suggestion}")
        lines += [f"  {found}: {', '.join(where)}" for found, where in places.items()]
    if any(one.where.startswith("param_groups[") for one in findings):
        lines.append(
            "For names, build the optimizer from model.named_parameters() or use amp.initialize."
        )
    return "\n".join(lines)


def _cells(row: TensorReading) -> tuple[str, ...]:
    """The line of a table: name, number, type, shares, and update over weight."""
    kind = dtype_name(row.dtype) + (" + master" if row.has_master else "")
    shares = (f"{share:.2%}" if row.elements else "-" for share in row.shares().values())
    ratio = "-" if math.isnan(row.update_ratio) else f"{row.update_ratio:.1e}"
    return row.parameter, f"{row.elements:,}", kind, *shares, ratio
