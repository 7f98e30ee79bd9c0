"""The meter: what half precision does to the weights and gradients of each tensor, step by step.

    optimizer.meter(every=100)
    ...
    print(optimizer.meter.report())

A metered step is an ordinary one, with the same bits, that counts while it updates. What it counts
goes to the host by itself; nothing waits until somebody reads.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampfuse.insight import meter_advice as advice
from ampfuse.optim.masters import HALF_DTYPES
from ampfuse.optim.skip_watch import Sample, is_captured

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from ampfuse._C import ParamTable
    from ampfuse.optim.base import AmpOptimizer

# As in csrc/core/meter.h: columns of the counts, and what updates are times.
_ELEMENTS, _CHANGED, _STALE, _ZERO, _SUBNORMAL, _EXPONENTS = range(6)
_UPDATE_FACTOR = 2.0**30
# Readings in a row, all of stale updates, after which a tensor without a master is warned of.
_PATIENCE = 5


@dataclasses.dataclass(frozen=True)
class TensorReading:
    """One tensor in one metered step. In a skipped step, and of a tensor without a gradient, all
    counts are 0.

    Attributes:
        step: the optimizer's, from 1 when the meter was made, skipped ones included.
        parameter: its name.
        dtype: of the weight that the model computes with.
        has_master: whether an FP32 master stands behind it.
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
            bins, and inf and NaN in the last. See :func:`exponent_edges`.
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


def exponent_edges() -> list[float]:
    """The 65 edges of the bins of `TensorReading.exponents`, as powers of two."""
    return [-149.0, *(4.0 * i - 126 for i in range(64))]


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
        self._logged = 0  # the last step that went to a writer
        # Of half rows without a master, not warned of yet: readings in a row that were stale.
        self._still: dict[int, int] = {}
        self._still_of: ParamTable | None = None
        self._unseen: deque[_Record] = deque()

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
        if self._optimizer._algorithm == "none":
            raise TypeError(
                f"{type(self._optimizer).__name__} has a step of its own, and the meter looks into "
                "the fused one. Use SGD, Adam, AdamW, Adagrad, LAMB, NovoGrad or Lion."
            )
        for name, value in (("every", every), ("history", history)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value!r}; it has to be a positive integer")
        if self._every is None:
            self._start = self._steps
        self._every = every
        self._keeps_bits = changed_bits
        self._records = deque(self._records, maxlen=history)
        return self

    # --- around a step --------------------------------------------------------------------------

    def before_update(self, table: ParamTable) -> list[Tensor] | None:
        """The buffers that the coming step fills; None if it is not metered."""
        if self._optimizer._rehearsal is not None:
            return None
        self._steps += 1
        if self._every is None or (self._steps - 1 - self._start) % self._every:
            return None
        if is_captured(table.param(0)):
            return None
        return table.new_meter(self._keeps_bits)

    def after_update(self, table: ParamTable, buffers: list[Tensor]) -> None:
        """Have what the step left brought to the host; warn of what earlier ones tell."""
        record = _Record(self._steps, table, buffers)
        self._records.append(record)
        self._unseen.append(record)
        while self._unseen and self._unseen[0].sample.has_arrived():
            self._warn(self._unseen.popleft())

    def _warn(self, record: _Record) -> None:
        table = record.table
        if self._still_of is not table:
            half = (
                row
                for row in range(record.row_count)
                if table.model(row) is None and table.param(row).dtype in HALF_DTYPES
            )
            self._still, self._still_of = dict.fromkeys(half, 0), table
        lost = set()
        for row in list(self._still):
            reading = record.row(row)
            if not reading.elements:
                continue
            self._still[row] = self._still[row] + 1 if advice.is_stale(reading) else 0
            if self._still[row] == _PATIENCE:
                del self._still[row]
                lost.add(reading.parameter)
        if lost and (found := [one for one in self.advice if one.parameter in lost]):
            warnings.warn(advice.in_words(found), stacklevel=8)

    # --- reading --------------------------------------------------------------------------------

    @property
    def readings(self) -> list[TensorReading]:
        """Of all metered steps that are kept, in order; waits for the device."""
        return [row for record in self._records for row in record.rows()]

    @property
    def advice(self) -> list[advice.Finding]:
        """What the last metered steps say is wrong, with what to do; waits for the device."""
        return advice.findings(self.readings)

    def report(self) -> str:
        """A table of the last metered step that was applied, and the advice."""
        return advice.report(self.readings)

    def frame(self) -> pandas.DataFrame:
        """A row for each :class:`TensorReading`, with its shares and ratio; needs pandas."""
        import pandas

        shares = ("stale_share", "subnormal_share", "update_ratio")
        return pandas.DataFrame(
            [
                dataclasses.asdict(row) | {name: getattr(row, name) for name in shares}
                for row in self.readings
            ]
        )

    def plot(self, path: str | Path | None = None) -> Figure:
        """A picture of all tensors over all readings, saved to `path` if given; needs matplotlib.

        See :func:`ampfuse.insight.meter_plot.draw`.
        """
        from ampfuse.insight.meter_plot import draw

        figure = draw(self.readings)
        if path is not None:
            figure.savefig(path)
        return figure

    def log(self, writer: Any) -> None:
        """Write what is new as scalars and histograms, under ``meter/<parameter>/``.

        Arguments:
            writer: a ``torch.utils.tensorboard.SummaryWriter``, or a Weights & Biases run.
        """
        edges = exponent_edges()
        for row in self.readings:
            if row.step <= self._logged or row.elements == 0:
                continue
            tag = f"meter/{row.parameter}"
            scalars = {
                f"{tag}/changed": row.changed / row.elements,
                f"{tag}/stale": row.stale / row.elements,
                f"{tag}/zero": row.zero / row.elements,
                f"{tag}/subnormal": row.subnormal / row.elements,
                f"{tag}/update_ratio": row.update_ratio,
            }
            if hasattr(writer, "add_scalar"):
                for name, value in scalars.items():
                    writer.add_scalar(name, value, row.step)
                counted = list(zip(row.exponents, edges[1:], strict=True))
                writer.add_histogram_raw(
                    f"{tag}/log2_gradient",
                    min=edges[0],
                    max=edges[-1],
                    num=sum(row.exponents),
                    sum=sum(count * edge for count, edge in counted),
                    sum_squares=sum(count * edge**2 for count, edge in counted),
                    bucket_limits=edges[1:],
                    bucket_counts=list(row.exponents),
                    global_step=row.step,
                )
                continue
            if (wandb := sys.modules.get("wandb")) is not None:
                histogram = wandb.Histogram(np_histogram=(list(row.exponents), edges))
                scalars[f"{tag}/log2_gradient"] = histogram
            writer.log(scalars | {"meter/step": row.step})
        self._logged = max((record.step for record in self._records), default=0)

    def changed(self, parameter: str) -> Tensor:
        """Which weights of `parameter` changed their bits in the last metered step.

        Returns:
            bool, of the parameter's shape, on its device.

        Raises:
            KeyError: no such parameter. RuntimeError: nothing was metered with ``changed_bits``.
        """
        record = next(iter(reversed(self._records)), None)
        if record is None or record.changed_bits is None:
            raise RuntimeError(
                "no metered step has kept the changed weights; switch that on by "
                "optimizer.meter(changed_bits=True)"
            )
        return record.changed(parameter)


class _Record:
    """What one metered step left."""

    def __init__(self, step: int, table: ParamTable, buffers: Sequence[Tensor]) -> None:
        self.step = step
        self.sample = Sample(*buffers[:2])
        self.changed_bits = buffers[2] if len(buffers) > 2 else None
        self.table = table
        self.row_count = len(buffers[0])
        self._rows: list[TensorReading] | None = None

    def rows(self) -> list[TensorReading]:
        if self._rows is None:
            self._rows = [self.row(row) for row in range(self.row_count)]
        return self._rows

    def row(self, row: int) -> TensorReading:
        counts, norms = self.sample.tensors()
        count = [value & 0xFFFFFFFF for value in counts[row].tolist()]  # they are unsigned
        update, weight_norm = norms[:, row].tolist()
        param, model = self.table.param(row), self.table.model(row)
        weight = param if model is None else model
        return TensorReading(
            self.step,
            self.table.name(row),
            weight.dtype,
            model is not None,
            count[_ELEMENTS],
            count[_CHANGED],
            count[_STALE] if weight.dtype in HALF_DTYPES else 0,
            count[_ZERO],
            count[_SUBNORMAL],
            update / _UPDATE_FACTOR,
            weight_norm,
            tuple(count[_EXPONENTS:]),
        )

    def changed(self, parameter: str) -> Tensor:
        names = [reading.parameter for reading in self.rows()]
        if parameter not in names:
            known = ", ".join(names[:3])
            raise KeyError(f"no parameter is called {parameter!r}; there are {known}, ...")
        row = names.index(parameter)
        if not self.rows()[row].elements:  # not stepped: its bits mean nothing
            return torch.zeros_like(self.table.param(row), dtype=torch.bool)
        assert self.changed_bits is not None
        chunk = 8 * self.changed_bits.shape[1]
        numels = [self.table.param(i).numel() for i in range(row + 1)]
        first = sum(-(-numel // chunk) for numel in numels[:-1])
        bits = self.changed_bits[first : first - (-numels[-1] // chunk)].flatten()
        places = torch.arange(8, dtype=torch.uint8, device=bits.device)
        marks = (bits[:, None] >> places & 1).flatten()[: numels[-1]].bool()
        param = self.table.param(row)  # in memory order, which its strides tell
        return torch.empty_like(param, dtype=torch.bool).set_(
            marks.untyped_storage(), 0, param.shape, param.stride()
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
