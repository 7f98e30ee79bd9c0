"""Turn an existing torch optimizer, in place, into one that amp can scale, inspect and skip."""

from __future__ import annotations

from typing import Any, Literal

import torch

from ampfuse.optim.base import AmpOptimizer
from ampfuse.optim.fused import FUSED, FusedOptimizer, is_fused
from ampfuse.optim.generic import GenericOptimizer, generic_class
from ampfuse.optim.larc import LARC
from ampfuse.optim.masters import MASTERS
from ampfuse.optim.options import check_options
from ampfuse.optim.param_groups import with_inner


def upgrade(
    optimizer: torch.optim.Optimizer,
    *,
    master_weights: bool | Literal["split"],
    names: dict[int, str] | None = None,
) -> None:
    """Make `optimizer` amp-aware in place: the same object, of a subclass of its class.

    Exactly ``torch.optim.SGD``, ``Adam``, ``AdamW``, ``Adagrad`` and ``Muon`` become fused; every
    other optimizer keeps its own step (generic.py). Of a LARC it is the wrapped one that changes.
    Learning-rate schedulers and hooks keep working, whichever came first.

    Arguments:
        master_weights: replace half parameters in ``param_groups`` by FP32 masters; ``"split"``,
            for fused optimizers: keep them there, each with the rest of its master beside it.
        names: parameter names for messages, by ``id`` of the parameter.

    Raises:
        TypeError: a parameter is neither float32, float16 nor bfloat16; ``"split"`` for an
            optimizer with a step of its own.
        ValueError: `master_weights` is none of its values, or does not go with the options of
            `optimizer`. Nothing has changed then.
    """
    check_upgrade(optimizer, master_weights)
    if isinstance(optimizer, LARC):
        upgrade(optimizer.optim, master_weights=master_weights, names=names)
        return
    cls: Any = type(optimizer)
    if not (is_fused(optimizer) or isinstance(optimizer, GenericOptimizer)):
        optimizer.__class__ = fused_class(optimizer) or generic_class(cls)
        _follow_class(optimizer)
        if isinstance(optimizer, FusedOptimizer):
            optimizer.note_keys_of_others()
    assert isinstance(optimizer, AmpOptimizer)
    optimizer.go_under_amp(master_weights=master_weights, names=names or {})
    if not master_weights:
        _drop_masters(optimizer)


def check_upgrade(
    optimizer: torch.optim.Optimizer, master_weights: bool | Literal["split"]
) -> None:
    """Raise TypeError or ValueError for what :func:`upgrade` cannot do."""
    check_options({"master_weights": master_weights})
    stepper = with_inner(optimizer)[-1]
    if fused_class(stepper) is None:
        if master_weights == "split":
            raise TypeError(
                f"master_weights='split' is stepped by fused optimizers alone, and "
                f"{type(stepper).__name__} has a step of its own. Use one of ampfuse.optim, or "
                "master_weights=True."
            )
        return
    if isinstance(stepper, FusedOptimizer):
        check_options({"rounding": stepper.rounding, "master_weights": master_weights})


def fused_class(optimizer: torch.optim.Optimizer) -> type[FusedOptimizer] | None:
    """The class with a fused step that `optimizer` has or gets; None: it keeps its own step."""
    if isinstance(optimizer, FusedOptimizer):
        return type(optimizer) if is_fused(optimizer) else None
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return None
    return FUSED.get(type(optimizer))  # by exact type: a subclass may step otherwise


def _drop_masters(optimizer: torch.optim.Optimizer) -> None:
    """Masters of a checkpoint that was loaded before: nobody would follow them from now on."""
    for each in with_inner(optimizer):
        for state in getattr(each, "state", {}).values():
            if isinstance(state, dict):
                for key in MASTERS & state.keys():
                    del state[key]


def _follow_class(optimizer: torch.optim.Optimizer) -> None:
    """What torch keeps per class or per instance and a change of class leaves behind."""
    # Step hooks live in a wrapper that torch puts on the class. What a class that does without
    # torch's constructor has not made is made here: the lists of hooks, at least.
    optimizer.__dict__.setdefault("defaults", {})
    torch.optim.Optimizer.__setstate__(optimizer, {})
    if isinstance(optimizer, FusedOptimizer):
        optimizer.state = optimizer.state
    step = optimizer.__dict__.get("step")
    if getattr(step, "_wrapped_by_lr_sched", False):
        # A scheduler built earlier wrapped the old class's step, to see that step was called.
        del optimizer.__dict__["step"]
