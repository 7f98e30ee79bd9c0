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
# What the program chose by `cpu_half_ops`; None: `amp.initialize` decides.
choice: bool | None = None


def cpu_half_ops(on: bool = True) -> contextlib.ExitStack:
    """Compute in half precision on the CPU by ampfuse's kernels; ``False``: by torch's again.

    Under ``torch.autocast("cpu")`` types are then chosen as on a GPU: softmax, norms, powers, sums
    and others give FP32, and ``binary_cross_entropy`` raises.

    ``amp.initialize`` calls it for models on the CPU at O1 to O5; at O2, O3 and O5 autocast stays
    torch's. An explicit call takes precedence over ``initialize``: after ``cpu_half_ops(False)`` it
    leaves torch's kernels and rules in place. The process's dispatch table changes, for all
    threads; call it while no other thread computes::

        ampfuse.cpu_half_ops()  # from here on: under torch.autocast, in half models

        with ampfuse.cpu_half_ops(False):  # in the block
            ...

    Returns:
        A context that restores, at its end, the state before the call.
    """
    before = contextlib.ExitStack()
    before.callback(_set, choice, _C.half_ops(), _C.autocast_rules())
    _set(on, on, on)
    return before


def enable_for(policy: Policy) -> None:
    """For ``initialize``: use what `policy` needs for a model on the CPU, unless the program has
    chosen."""
    if choice is None and policy.computes_in_half:
        use(True, rules=policy.autocast_type is not None or _C.autocast_rules())


def use(kernels: bool, *, rules: bool = False) -> None:
    """Use our kernels, and under autocast a GPU's rules, until the next ``initialize``."""
    _set(choice, kernels, rules)


def reset() -> None:
    """Put torch's kernels and rules back, and let ``initialize`` decide again."""
    _set(None, False, False)


def _set(new_choice: bool | None, kernels: bool, rules: bool) -> None:
    global choice
    choice = new_choice
    _C.set_half_ops(kernels)
    _C.set_autocast_rules(rules)
    # The key of torch.compile's cache on disk does not contain the rules that chose the types.
    tag = compiler.cache_key_tag.replace(_TAG, "")
    compiler.cache_key_tag = tag + _TAG if rules else tag
