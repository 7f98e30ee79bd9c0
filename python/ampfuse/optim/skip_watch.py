"""A training that has stopped, because every step is skipped, says so; nothing waits for that.

One non-finite gradient after another halves the loss scale down to its minimum, and then every step
is skipped for ever.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# From the default scale to the default minimum are 40 overflows.
STRETCH = 200


class SkipWatch:
    """Raises, a stretch later, after `STRETCH` steps in a row that were skipped."""

    def __init__(self) -> None:
        self._steps = 0
        self._counts: list[Sample] = []  # of skipped steps, one a stretch, the latest last

    def after_step(self, table: Any) -> None:
        """Call after each step of an optimizer's `table`."""
        self._steps += 1
        if self._steps % STRETCH != 1:
            return
        count = table.inspector.state_field("skipped_steps")
        if is_captured(count):
            return
        counts, self._counts = self._counts, [*self._counts[-1:], Sample(count)]
        if len(counts) > 1:
            before, after = (int(each.values()[0]) for each in counts)
            if after - before == STRETCH:
                raise RuntimeError(_message(table))


class Sample:
    """Tensors of a device, on their way to the host."""

    def __init__(self, *tensors: Tensor) -> None:
        self._events = []
        self._copies: list[Tensor] = []
        for tensor in tensors:
            if not tensor.is_cuda:
                self._copies.append(tensor.clone())
                continue
            # (By name: torch.set_default_device may say another.)
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
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
