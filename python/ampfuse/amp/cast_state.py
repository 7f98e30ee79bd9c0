"""By what torch's functions, and functions of one's own, are cast where a thread is right now.

Inside the ``forward`` of a model its level decides, outside the latest ``initialize``, and inside
:func:`disable_casts` nobody.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator

import torch

from ampfuse.amp.op_rules import AS_WRITTEN, Scope
from ampfuse.optim import generic


class _Thread(threading.local):
    def __init__(self) -> None:
        self.scope: Scope | None = None  # of the innermost region; None outside of all
        self.disabled = 0


thread = _Thread()
outside: Scope = AS_WRITTEN  # of every thread, wherever it is in no region


def scope() -> Scope:
    return thread.scope or outside


def set_outside(value: Scope) -> None:
    """What the latest ``initialize`` says, for all threads."""
    global outside
    outside = value
    if value is not AS_WRITTEN:
        _end_in_forks()


@functools.cache
def _end_in_forks() -> None:
    """In a worker that loads data nothing is computed for the model."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: set_outside(AS_WRITTEN))


@contextlib.contextmanager
def region(scope: Scope | None) -> Iterator[None]:
    """Functions called inside the block, in this thread, are cast by `scope`; None: `outside`'s."""
    outer = thread.scope
    thread.scope = scope
    try:
        yield
    finally:
        thread.scope = outer


@contextlib.contextmanager
def _around_step() -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """No function in the block is cast; where its value makes a context, as outside the block."""
    outer = thread.scope
    with region(AS_WRITTEN):
        yield functools.partial(region, outer)


generic.around_step = _around_step


forward_ran = False  # of a model at O1 or O4, since the latest ``initialize``


def note_forward(ran: bool = True) -> None:
    """A forward begins; or, where none `ran`, a training. Compiles to one store."""
    global forward_ran
    forward_ran = ran


def casts_are_disabled() -> bool:
    """True in this thread inside :func:`disable_casts`."""
    return getattr(thread, "disabled", 0) > 0


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Compute as written inside the block: no cast of O1 or O4 happens in it, in this thread.

    Turns autocast off and stops half outputs from computing their losses in FP32. What was before
    is there again afterwards, also when the block raises, and blocks may be nested. Half tensors
    from outside stay half; cast them (``x.float()``) where FP32 is wanted.
    """
    accelerator = torch.accelerator.current_accelerator() or torch.device("cpu")
    on_accelerator = torch.autocast(accelerator.type, enabled=False)
    thread.disabled += 1
    try:
        with region(AS_WRITTEN), torch.autocast("cpu", enabled=False), on_accelerator:
            yield
    finally:
        thread.disabled -= 1
