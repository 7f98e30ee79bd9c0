"""Read tensors on a device without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


class Sample:
    """Copies of tensors, on their way from a device to the host."""

    def __init__(self, *tensors: Tensor) -> None:
        self._events = []
        self._copies: list[Tensor] = []
        for tensor in tensors:
            if not tensor.is_cuda:
                self._copies.append(tensor.clone())
                continue
            # The device is given, as torch.set_default_device may have set another.
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
        """The values of tensors of one element. Waits for them."""
        return [tensor.item() for tensor in self.tensors()]


def is_captured(number: Tensor) -> bool:
    """Whether a CUDA graph is being captured, during which `number` cannot be read."""
    return number.is_cuda and torch.cuda.is_current_stream_capturing()
