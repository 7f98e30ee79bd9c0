"""Small helpers for torch: types, reading without waiting, and staying out of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

HALF_DTYPES = (torch.float16, torch.bfloat16)
# The types of parameters and gradients that the kernels read and write.
FLOAT_DTYPES = (torch.float32, *HALF_DTYPES)

Function = TypeVar("Function", bound=Callable[..., Any])


def dynamo_disable(function: Function) -> Function:
    """Decorator: compiled code calls `function` uncompiled, with everything that it calls.

    For functions that work in the extension, which Dynamo cannot trace: it would compile the lines
    between the calls one by one, again for each parameter. ``torch.compiler.disable`` does the
    same, but imports Dynamo, which takes a second.
    """
    call: Any = torch._disable_dynamo(function)
    # For the message of fullgraph=True.
    call._torchdynamo_disable = True
    call._torchdynamo_disable_msg = "ampfuse does this in its extension, outside of any graph"
    return call


class Sample:
    """Copies of tensors, made on the host without waiting for the device."""

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
