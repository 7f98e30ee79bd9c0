"""Skipped steps, told without waiting; and a training that has stopped, which skips every step.

One non-finite gradient after another halves the loss scale down to its minimum, and then every step
is skipped for ever. The count of skipped steps is on the device; it is copied to the host now and
then and read when it has arrived, so nothing waits.
"""

from __future__ import annotations

import ctypes
import logging
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger("ampfuse.amp")

# From the default scale to the default minimum are 40 overflows.
STRETCH = 200
# Between two looks at a count on a GPU; on the CPU it is there at once.
_PAUSE = 20


class SkipWatch:
    """Raises after `STRETCH` skipped steps in a row, at the latest after three times as many."""

    def __init__(self) -> None:
        self._steps = 0
        self._samples: list[Sample] = []  # of the count of skipped steps, STRETCH steps apart
        self._table: Any = None
        self._count: Tensor  # of the table's skipped steps
        self._next = 1  # the count to tell of
        self._here: ctypes.c_int32 | None = None  # the count, if it is on the CPU
        self._latest: Sample | None = None

    def after_step(self, table: Any, *, tell: bool = False) -> None:
        """Call after each step of an optimizer's `table`.

        Arguments:
            tell: log the first skipped step, and then the 10th, the 100th and so on.

        Raises:
            RuntimeError: a whole stretch of steps was skipped. It is told once a stretch.
        """
        self._steps += 1
        if tell:
            self._tell(table)
        if self._steps % STRETCH:
            return
        count = table.inspector.state_field("skipped_steps")
        if is_captured(count):
            return
        self._samples = [*self._samples[-2:], Sample(count)]
        for older, newer in pairwise(self._samples):
            if newer.has_arrived() and newer.values()[0] - older.values()[0] == STRETCH:
                self._samples = self._samples[-1:]
                raise RuntimeError(_message(table))

    def _tell(self, table: Any) -> None:
        if table is not self._table:
            self._table, self._count = table, table.inspector.state_field("skipped_steps")
            self._next, self._latest, self._here = 1, None, None
            if not self._count.is_cuda:  # read from memory, at a fortieth of what int(tensor) takes
                self._here = ctypes.c_int32.from_address(self._count.data_ptr())
        if self._here is not None:
            if self._here.value >= self._next:
                self._log(self._here.value)
            return
        if self._steps % _PAUSE or is_captured(self._count):
            return
        if self._latest is None or self._latest.has_arrived():
            if self._latest is not None:
                self._log(int(self._latest.values()[0]))
            self._latest = Sample(self._count)

    def _log(self, skipped: int) -> None:
        if skipped < self._next:
            return
        self._next = 10 ** len(str(skipped))
        _log.warning(
            "Gradient overflow: %d steps skipped so far, while the loss scale adapts. "
            "optimizer.last_step.overflow() names the parameter.",
            skipped,
        )


class Sample:
    """Tensors of a device, on their way to the host."""

    def __init__(self, *tensors: Tensor) -> None:
        self._events = []
        self._copies: list[Tensor] = []
        for tensor in tensors:
            if not tensor.is_cuda:
                self._copies.append(tensor.clone())
                continue
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._copies.append(copy.copy_(tensor, non_blocking=True))
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            self._events.append(torch.cuda.current_stream(device).record_event())

    def has_arrived(self) -> bool:
        return all(event.query() for event in self._events)

    def tensors(self) -> list[Tensor]:
        """The copies. Waits for them."""
        for event in self._events:
            event.synchronize()
        return self._copies

    def values(self) -> list[float]:
        """Of tensors of one element."""
        return [tensor.item() for tensor in self.tensors()]


def is_captured(number: Tensor) -> bool:
    """Whether a CUDA graph is being recorded, which nothing may look into."""
    return number.is_cuda and torch.cuda.is_current_stream_capturing()


def _message(table: Any) -> str:
    row = int(table.inspector.state_field("last_bad_row"))
    where = f"; the last was in {table.name(row)}" if row >= 0 else ""
    return (
        f"{STRETCH} steps in a row were skipped: every backward pass left inf or NaN in a "
        f"gradient{where}. No loss scale helps then. Look at the loss (is it finite without amp?), "
        "the learning rate and the data. The parameters are those of the last applied step."
    )
