"""The session of one call of ``initialize``: its policy and its loss scalers.

A session is an attribute of its optimizers (``optimizer._amp_session``), so the results of several
calls are independent. The only global is a reference to the latest one, for ``amp.state_dict()``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ampfuse.amp import cast_state
from ampfuse.amp.policy import Policy
from ampfuse.amp.scaler import LossScaler


@dataclasses.dataclass(eq=False)
class Session:
    """`policy` is None when amp is off: then every amp call passes its arguments through.

    `everywhere`: O1 and O4 cast outside the models too; `casts_cpu`: CPU tensors are the model's.
    ``scale_loss`` ends with ``after_pass(self, loss_id, optimizers, delay_unscale,
    delay_overflow_check)``, the last four of which are its own arguments.
    """

    policy: Policy | None
    loss_scalers: list[LossScaler] = dataclasses.field(default_factory=list)
    verbosity: int = 1
    everywhere: bool = False
    casts_cpu: bool = True
    after_pass: Callable[[Session, int, list[Any], bool, bool], None] | None = None

    @property
    def enabled(self) -> bool:
        return self.policy is not None

    @property
    def is_dynamic(self) -> bool:
        return self.policy is not None and self.policy.is_dynamic


_latest: Session | None = None


def enabled_of(optimizer: Optimizer) -> Session | None:
    """The session of `optimizer`, if it has one with amp on."""
    session = getattr(optimizer, "_amp_session", None)
    return session if session is not None and session.enabled else None


def set_latest(session: Session) -> None:
    global _latest
    _latest = session
    cast_state.reset_forward()
    follow_latest()


def follow_latest() -> None:
    """Leave autocast on outside the models, in this thread, if the latest session says so."""
    cast_state.end_everywhere()
    session = _latest
    if session is None or session.policy is None or not session.everywhere:
        return
    if (dtype := session.policy.autocast_type) is not None:
        accelerator = torch.accelerator.current_accelerator()
        types = ["cpu"] if session.casts_cpu else []
        types += [] if accelerator is None else [accelerator.type]
        cast_state.begin_everywhere(types, dtype)


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """A block that starts without a session, and whose sessions end with it."""
    global _latest
    before, forward_ran = _latest, cast_state.forward_ran
    cast_state.end_everywhere()
    try:
        yield
    finally:
        _latest = before
        follow_latest()
        cast_state.forward_ran = forward_ran


def end_everywhere() -> None:
    """Stop casting outside the models, also after :func:`ampfuse.amp.cast_everywhere`."""
    if _latest is not None:
        _latest.everywhere = False
        follow_latest()


def latest() -> Session:
    """The session of the latest ``initialize``.

    Raises:
        RuntimeError: ``initialize`` was not called.
    """
    if _latest is None:
        raise RuntimeError("Call amp.initialize first.")
    return _latest


def of_optimizers(optimizers: Sequence[Optimizer]) -> Session:
    """The session that scales losses for `optimizers`: that of the first.

    Raises:
        RuntimeError: one of them never went through ``initialize``, or their sessions do not agree
            on whether an overflow skips the step.
    """
    sessions = [_of(optimizer) for optimizer in optimizers]
    if len({(session.enabled, session.is_dynamic) for session in sessions}) > 1:
        raise RuntimeError(
            "These optimizers come from different amp.initialize calls, some with dynamic and "
            "some with static loss scaling or with amp off. An overflow would skip only some of "
            "their steps. Initialize them in one call: "
            "amp.initialize([model_a, model_b], [optimizer_a, optimizer_b])."
        )
    return sessions[0]


def _of(optimizer: Optimizer) -> Session:
    session: Session | None = getattr(optimizer, "_amp_session", None)
    # With amp off, an optimizer that initialize was not given has no attribute.
    if session is None and _latest is not None and not _latest.enabled:
        session = _latest
    if session is not None:
        return session
    if _latest is None:
        raise RuntimeError("Call amp.initialize(model, optimizer) before amp.scale_loss.")
    raise RuntimeError(
        f"This {type(optimizer).__name__} did not go through amp.initialize. Pass every optimizer "
        "of the model to it, and use the ones it returns."
    )
