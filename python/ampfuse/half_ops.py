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
_user_choice: bool | None = None


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
    before.callback(_choose, _user_choice, _C.half_ops(), _C.autocast_rules())
    _choose(on, on, on)
    return before


def unless_disabled() -> contextlib.ExitStack:
    """:func:`cpu_half_ops` for a block, or ``cpu_half_ops(False)`` if the program chose that."""
    return cpu_half_ops(_user_choice is not False)


def reset() -> None:
    """Put torch's kernels and rules back, and let ``initialize`` decide again."""
    _choose(None, False, False)


def enable_for(policy: Policy) -> None:
    """Use the kernels and rules that `policy` needs for a model on the CPU."""
    if _user_choice is None and policy.computes_in_half:
        use(True, rules=policy.autocast_type is not None or _C.autocast_rules())


def use(kernels: bool, *, rules: bool = False) -> None:
    """Use our kernels, and under autocast a GPU's rules, until the next ``initialize``."""
    _C.set_half_ops(kernels)
    _C.set_autocast_rules(rules)
    # The key of torch.compile's cache on disk does not contain the rules that chose the types.
    compiler.cache_key_tag = compiler.cache_key_tag.replace(_TAG, "") + _TAG * rules


def _choose(choice: bool | None, kernels: bool, rules: bool) -> None:
    global _user_choice
    _user_choice = choice
    use(kernels, rules=rules)
