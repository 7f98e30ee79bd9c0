"""Autocast outside the models' ``forward``: where it is left on, and where it is off again.

At O1 and O4 autocast is on inside ``forward``. :func:`leave_on` leaves it on outside too, in this
thread: but not in the ``forward`` of models at other levels, in backward passes and in steps. Its
cache is off, as weights may change at any time.
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
        # Device types that autocast is left on for, with the previous autocast type of each.
        self.left_on: dict[str, torch.dtype] = {}
        self.disabled = 0


thread = _Thread()


def leave_on(device_types: Sequence[str], dtype: torch.dtype) -> None:
    """Autocast stays on in this thread until :func:`end`."""
    for device_type in device_types:
        thread.left_on[device_type] = torch.get_autocast_dtype(device_type)
        torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_cache_enabled(False)
    _end_in_forks()


def end() -> None:
    """Undo :func:`leave_on`, if it was called in this thread."""
    if not thread.left_on:
        return
    for device_type, dtype in thread.left_on.items():
        torch.set_autocast_enabled(device_type, False)
        torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_cache_enabled(True)
    thread.left_on = {}


@functools.cache
def _end_in_forks() -> None:
    """Workers that load data compute nothing for the model."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=end)


@contextlib.contextmanager
def inside_forward(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    """Autocast in the ``forward`` of a model at O1 or O4, also if it was left on outside."""
    outer, thread.left_on = thread.left_on, {}
    try:
        with torch.autocast(device_type, dtype=dtype, cache_enabled=True):
            yield
    finally:
        thread.left_on = outer


def off_if_left_on() -> contextlib.AbstractContextManager[None]:
    """A block without the autocast that was left on; one that the user has opened stays."""
    return _autocast_off() if thread.left_on else contextlib.nullcontext()


@contextlib.contextmanager
def _autocast_off() -> Iterator[None]:
    accelerator = torch.accelerator.current_accelerator() or torch.device("cpu")
    on_accelerator = torch.autocast(accelerator.type, enabled=False)
    with torch.autocast("cpu", enabled=False), on_accelerator:
        yield


forward_ran = False  # whether a model at O1 or O4 ran since the latest ``initialize``


def note_forward(ran: bool = True) -> None:
    """A forward begins, or with ``ran=False`` a training. Compiles to one store."""
    global forward_ran
    forward_ran = ran


def casts_are_disabled() -> bool:
    """True in this thread inside :func:`disable_casts`."""
    return getattr(thread, "disabled", 0) > 0


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
