"""Half types on the CPU: kernels in place of torch's slow ones (csrc/torch/half_ops.cpp), and a
GPU's rules by which autocast chooses types (csrc/torch/half_rules.cpp)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from torch.compiler import config as compiler

from ampfuse._core import EXTENSION as _C  # torch has one table of kernels

if TYPE_CHECKING:
    from ampfuse.amp.policy import Policy

_TAG = "; autocast by a GPU's rules (ampfuse)"
_by_name: bool | None = None  # what the program said; None: amp.initialize decides


def cpu_half_ops(on: bool = True) -> contextlib.ExitStack:
    """Compute in half precision on the CPU by ampfuse's kernels; ``False``: by torch's again.

    Under ``torch.autocast("cpu")`` types are then chosen as on a GPU: softmax, norms, powers, sums
    and others give FP32, and ``binary_cross_entropy`` raises.

    ``amp.initialize`` does so by itself for models on the CPU at O1 to O5; at O2, O3 and O5
    autocast stays torch's. What is said by name holds: after ``cpu_half_ops(False)`` it leaves
    torch's kernels and rules in place. It is the process's dispatch table that changes, for all
    threads; call it while no other one computes::

        ampfuse.cpu_half_ops()  # from here on: under torch.autocast, in half models

        with ampfuse.cpu_half_ops(False):  # in the block
            ...

    Returns:
        A context that puts back, at its end, what was there before the call.
    """
    before = contextlib.ExitStack()
    before.callback(_set, _by_name, _C.half_ops(), _C.autocast_rules())
    _set(on, on, on)
    return before


def unless_refused() -> contextlib.ExitStack:
    """:func:`cpu_half_ops` for a block, or ``cpu_half_ops(False)`` if the program said that."""
    return cpu_half_ops(_by_name is not False)


def forget() -> None:
    """Put torch's kernels and rules back, as if nothing had been said by name."""
    _set(None, False, False)


def follow(policy: Policy) -> None:
    """A model on the CPU is put at a level."""
    if _by_name is None and policy.computes_in_half:
        use(True, rules=policy.autocast_type is not None or _C.autocast_rules())


def use(kernels: bool, *, rules: bool = False) -> None:
    """Our kernels, and under autocast a GPU's rules, until the next ``initialize``."""
    _C.set_half_ops(kernels)
    _C.set_autocast_rules(rules)
    # torch.compile keeps code on disk by a key that has no rules in it; types would be another's.
    compiler.cache_key_tag = compiler.cache_key_tag.replace(_TAG, "") + _TAG * rules


def _set(by_name: bool | None, kernels: bool, rules: bool) -> None:
    global _by_name
    _by_name = by_name
    use(kernels, rules=rules)
