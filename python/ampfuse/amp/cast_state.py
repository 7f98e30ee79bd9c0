"""Whether, and to which type, functions are cast right now in this thread.

Inside the ``forward`` of a model its level decides. Outside, where losses are computed, the latest
``initialize`` does.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from ampfuse.amp import session as sessions
from ampfuse.amp.half_output import casts_are_disabled

_thread = threading.local()


@contextlib.contextmanager
def inside_forward(dtype: torch.dtype | None) -> Iterator[None]:
    """A region whose level casts functions to `dtype`; None if it casts none."""
    outer = getattr(_thread, "regions", ())
    _thread.regions = (*outer, dtype)
    try:
        yield
    finally:
        _thread.regions = outer


def inside_a_model() -> bool:
    return bool(getattr(_thread, "regions", ()))


def active_dtype() -> torch.dtype | None:
    """The low-precision type of O1 (float16) or O4 (bfloat16) where one is in force, else None."""
    if casts_are_disabled():
        return None
    regions = getattr(_thread, "regions", ())
    return regions[-1] if regions else sessions.cast_dtype()
