"""The meter: what half precision does to the weights and gradients of each tensor, step by step.

A metered step is an ordinary one, with the same bits, that counts while it updates. What it counts
goes to the host by itself; nothing waits until it is read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ampfuse._schema import METER_COUNTS, UPDATE_FACTOR
from ampfuse.async_read import Sample, is_captured
from ampfuse.dtypes import HALF_DTYPES
from ampfuse.insight import readings as _readings
from ampfuse.insight.readings import TensorReading
from ampfuse.insight.reports import Finding
from ampfuse.optim.fused import FusedOptimizer

if TYPE_CHECKING:
    from ampfuse._C import ParamTable
    from ampfuse.optim.base import AmpOptimizer


class Meter:
    """``optimizer.meter``; switched on by calling it. One for each optimizer.

    Graphed steps are not metered, nor are those of an optimizer that is not ours.
    """

    def __init__(self, optimizer: AmpOptimizer) -> None:
        self._optimizer = optimizer
        self._every: int | None = None
        self._steps = self._start = 0  # so far, and when the meter was switched on
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
        if not isinstance(self._optimizer, FusedOptimizer):
            raise TypeError(
                f"{type(self._optimizer).__name__} has a custom step(), and the meter only works "
                "with fused ones. Use SGD, Adam, AdamW, Adagrad, LAMB, NovoGrad, Lion or Muon."
            )
        for name, value in (("every", every), ("history", history)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self._every is None:
            self._start = self._steps
        self._every = every
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
        """Have what the step left brought to the host."""
        self._records.append(_Record(self._steps, table, buffers))

    # --- reading --------------------------------------------------------------------------------

    @property
    def readings(self) -> list[TensorReading]:
        """The readings of all metered steps that are kept, in order; waits for the device."""
        return [row for record in self._records for row in record.rows]

    @property
    def advice(self) -> list[Finding]:
        """What the last metered steps say is wrong, with what to do; waits for the device."""
        return _readings.find(self.readings)

    def report(self) -> str:
        """A table of the last metered step that was applied, and the advice."""
        return _readings.report(self.readings)

    def changed(self, parameter: str) -> Tensor:
        """Which weights of `parameter` changed their bits in the last metered step.

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
    """What one metered step left."""

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
        # In memory order, which the parameter's strides tell.
        return torch.empty_like(param, dtype=torch.bool).set_(
            flat.untyped_storage(), 0, param.shape, param.stride()
        )
