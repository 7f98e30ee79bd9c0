"""Notice a training that has stopped: step after step is skipped, and nothing says so.

One non-finite gradient after another halves the loss scale down to its minimum, and then every step
is skipped for ever. The count of skipped steps is on the device; it is copied to the host now and
then and read when it has arrived, so nothing waits.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# From the default scale to the default minimum are 40 overflows.
STRETCH = 200


class SkipWatch:
    """Raises after `STRETCH` skipped steps in a row, at the latest after three times as many."""

    def __init__(self) -> None:
        self._steps = 0
        self._samples: list[_Sample] = []  # of the count of skipped steps, STRETCH steps apart

    def after_step(self, table: Any) -> None:
        """Call after each step of an optimizer's `table`.

        Raises:
            RuntimeError: a whole stretch of steps was skipped. It is told once a stretch.
        """
        self._steps += 1
        if self._steps % STRETCH:
            return
        count = table.state_field("skipped_steps")
        if count.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._samples = [*self._samples[-2:], _Sample(count)]
        for older, newer in pairwise(self._samples):
            if newer.has_arrived() and newer.value() - older.value() == STRETCH:
                self._samples = self._samples[-1:]
                raise RuntimeError(_message(table))


class _Sample:
    def __init__(self, count: Tensor) -> None:
        self._event = None
        if not count.is_cuda:
            self._value = count.clone()
            return
        self._value = torch.empty((), dtype=count.dtype, pin_memory=True)
        self._value.copy_(count, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def has_arrived(self) -> bool:
        return self._event is None or self._event.query()

    def value(self) -> int:
        return int(self._value)


def _message(table: Any) -> str:
    row = int(table.state_field("last_bad_row"))
    where = f"; the last was in {table.name(row)}" if row >= 0 else ""
    return (
        f"{STRETCH} steps in a row were skipped: every backward pass left inf or NaN in a "
        f"gradient{where}. No loss scale helps then. Look at the loss (is it finite without amp?), "
        "the learning rate and the data. The parameters are those of the last applied step."
    )
