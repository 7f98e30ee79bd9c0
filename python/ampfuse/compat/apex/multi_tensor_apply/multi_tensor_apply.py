"""Calls an ``amp_C`` operation with a chunk size, which has no effect on results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class MultiTensorApply:
    """``applier(op, noop_flag, tensor_lists, *args)`` is ``op(chunk_size, noop_flag, ...)``.

    Attributes:
        available: always True: the operations are part of ampfuse.
        chunk_size: as given; the operations choose their own.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: Tensor,
        tensor_lists: list[list[Tensor]],
        *args: Any,
    ) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
