"""Skipped steps, told without waiting; and a training that has stopped, which skips every step.

One non-finite gradient after another halves the loss scale down to its minimum, and then every step
is skipped for ever. The count of skipped steps is on the device; it is copied to the host now and
then and read when it has arrived, so nothing waits.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger("ampfuse.amp")

# From the default scale to the default minimum are 40 overflows.
STRETCH = 200
# Steps between two looks at a count on a GPU; on the CPU it is there at once.
_PAUSE = 20


class SkipWatch:
    """Raises after `STRETCH` skipped steps in a row; on a GPU a few looks later."""

    def __init__(self) -> None:
        self._table: Any = None

    def _start(self, table: Any) -> None:
        self._table, self._count = table, table.inspector.state_field("skipped_steps")
        self._next = 1  # the count to tell of
        self._steps = self._applied = self._applied_until = 0
        self._here: ctypes.c_int32 | None = None  # the count, if it is on the CPU
        self._sample: tuple[int, Sample] | None = None  # of the count after so many steps
        if not self._count.is_cuda:  # read from memory, at a fortieth of what int(tensor) takes
            self._here = ctypes.c_int32.from_address(self._count.data_ptr())

    def after_step(self, table: Any, *, tell: bool = False) -> None:
        """Call after each step of an optimizer's `table`.

        Arguments:
            tell: log the first skipped step, and then the 10th, the 100th and so on.

        Raises:
            RuntimeError: a whole stretch of steps was skipped. It is told once a stretch.
        """
        if table is not self._table:
            self._start(table)
        self._steps += 1
        if self._here is not None:
            self._look(self._steps, self._here.value, tell)
        elif self._steps % _PAUSE == 0 and not is_captured(self._count):
            sample = self._sample
            if sample is None or sample[1].has_arrived():
                self._sample = self._steps, Sample(self._count)
                if sample is not None:
                    self._look(sample[0], int(sample[1].values()[0]), tell)

    def _look(self, steps: int, skipped: int, tell: bool) -> None:
        """`skipped` of the first `steps` were."""
        if tell and skipped >= self._next:
            self._next = 10 ** len(str(skipped))
            _log.warning(
                "Gradient overflow: %d steps skipped so far, while the loss scale adapts. "
                "optimizer.last_step.overflow() names the parameter.",
                skipped,
            )
        if steps - skipped != self._applied:
            self._applied, self._applied_until = steps - skipped, steps
        elif steps - self._applied_until >= STRETCH:
            self._applied_until = steps
            raise RuntimeError(_message(self._table))


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
