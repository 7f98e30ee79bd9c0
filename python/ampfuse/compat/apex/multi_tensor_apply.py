"""``apex.multi_tensor_apply``: an ``amp_C`` operation called with a chunk size, without effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class MultiTensorApply:
    """``applier(op, noop_flag, tensor_lists, *args)`` is ``op(chunk_size, noop_flag, ...)``."""

    available, warned = True, False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], *args: Any) -> Any:
        return op(self.chunk_size, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)
