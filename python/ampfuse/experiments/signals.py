"""Ctrl-C and SIGTERM as a wish that the loop reads between two steps, so that it can save first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class StopWish:
    """``received`` is the number of the first such signal, or None. A second Ctrl-C ends it."""

    def __init__(self) -> None:
        self.received: int | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number


@contextlib.contextmanager
def listening() -> Iterator[StopWish]:
    """Take Ctrl-C and SIGTERM as wishes inside the ``with`` block."""
    wish, before = StopWish(), {}
    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, wish.note)
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
