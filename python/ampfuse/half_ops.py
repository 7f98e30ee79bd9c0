"""Kernels for half types on the CPU in place of torch's slow ones (csrc/torch/half_ops.cpp)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ampfuse._core import EXTENSION as _C  # torch has one table of kernels

if TYPE_CHECKING:
    from ampfuse.amp.policy import Policy

_by_name: bool | None = None  # what the program said; None: amp.initialize decides


def cpu_half_ops(on: bool = True) -> contextlib.ExitStack:
    """Compute in half precision on the CPU by ampfuse's kernels; ``False``: by torch's again.

    ``amp.initialize`` does so by itself for models on the CPU at O1 to O5. What is said by name
    holds: after ``cpu_half_ops(False)`` it leaves torch's kernels in place. It is the process's
    dispatch table that changes, for all threads; call it while no other one computes::

        ampfuse.cpu_half_ops()  # from here on: under torch.autocast, in half models

        with ampfuse.cpu_half_ops(False):  # in the block
            ...

    Returns:
        A context that puts back, at its end, what was there before the call.
    """
    before = contextlib.ExitStack()
    before.callback(_set, _by_name, _C.half_ops())
    _set(on, on)
    return before


def unless_refused() -> contextlib.ExitStack:
    """:func:`cpu_half_ops` for a block, or ``cpu_half_ops(False)`` if the program said that."""
    return cpu_half_ops(_by_name is not False)


def forget() -> None:
    """Put torch's kernels back, as if nothing had been said by name."""
    _set(None, False)


def follow(policy: Policy) -> None:
    """A model on the CPU is put at a level."""
    if _by_name is None and policy.computes_in_half:
        use(True)


def use(on: bool) -> None:
    """As :func:`cpu_half_ops`, until the next ``initialize``."""
    _C.set_half_ops(on)


def _set(by_name: bool | None, on: bool) -> None:
    global _by_name
    _by_name = by_name
    use(on)
