"""Autocast inside the models' ``forward`` and, after ``cast_everywhere``, outside.

At O1 and O4 autocast is on inside ``forward``. :func:`begin_everywhere` turns it on in the whole
thread, except in the ``forward`` of models at other levels, in backward passes and in steps. Its
cache is off there, as weights may change at any time.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator, Sequence

import torch


class _Thread(threading.local):
    def __init__(self) -> None:
        # Device types with autocast everywhere; whether it was on before, and with which type.
        self.everywhere: dict[str, tuple[bool, torch.dtype]] = {}
        self.cached_before = True
        self.disabled = 0


thread = _Thread()


def begin_everywhere(device_types: Sequence[str], dtype: torch.dtype) -> None:
    """Turn autocast on in this thread until :func:`end_everywhere`."""
    for device_type in device_types:
        before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        thread.everywhere[device_type] = before
        torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_enabled(device_type, True)
    thread.cached_before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    _end_in_forks()


def end_everywhere() -> None:
    """Undo :func:`begin_everywhere`, if it was called in this thread."""
    if not thread.everywhere:
        return
    # A region of the user's may have ended since, and has undone some of this.
    for device_type, (enabled, dtype) in thread.everywhere.items():
        if torch.is_autocast_enabled(device_type):
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
    if not torch.is_autocast_cache_enabled():
        torch.set_autocast_cache_enabled(thread.cached_before)
    thread.everywhere = {}


@functools.cache
def _end_in_forks() -> None:
    """Have forked processes, which load data, start without autocast."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=end_everywhere)


@contextlib.contextmanager
def inside_forward(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    """Block of a ``forward`` at O1 or O4: autocast is on, with its cache."""
    outer, thread.everywhere = thread.everywhere, {}
    try:
        with torch.autocast(device_type, dtype=dtype, cache_enabled=True):
            yield
    finally:
        thread.everywhere = outer


def off_if_everywhere() -> contextlib.AbstractContextManager[None]:
    """Block without autocast if it is on everywhere; a region that the user opened stays."""
    return _autocast_off() if thread.everywhere else contextlib.nullcontext()


@contextlib.contextmanager
def _autocast_off() -> Iterator[None]:
    accelerator = torch.accelerator.current_accelerator() or torch.device("cpu")
    on_accelerator = torch.autocast(accelerator.type, enabled=False)
    with torch.autocast("cpu", enabled=False), on_accelerator:
        yield


forward_ran = False  # whether a model at O1 or O4 ran since the latest ``initialize``


def mark_forward() -> None:
    """A ``forward`` begins. Compiles to one store."""
    global forward_ran
    forward_ran = True


def reset_forward() -> None:
    """A training begins, of which no ``forward`` ran yet."""
    global forward_ran
    forward_ran = False


def casts_are_disabled() -> bool:
    """True in this thread inside :func:`disable_casts`."""
    return thread.disabled > 0


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Compute without the casts of O1 and O4 inside the block, in this thread.

    The previous state returns afterwards, also when the block raises, and blocks may be nested.
    Half tensors from outside stay half; cast them (``x.float()``) where FP32 is wanted.
    """
    thread.disabled += 1
    try:
        with _autocast_off():
            yield
    finally:
        thread.disabled -= 1
