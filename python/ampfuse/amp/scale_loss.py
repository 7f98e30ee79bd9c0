"""``with amp.scale_loss(loss, optimizer) as scaled: scaled.backward()``.

Around one backward pass: on entry every optimizer sets aside the gradients it already has and the
loss is multiplied by the scale; on exit the new gradients are unscaled where they may be read,
and inspected, and the scale adapts. All of it is enqueued on the device; nothing waits.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampfuse.amp import cast_state, no_sync
from ampfuse.amp import session as sessions
from ampfuse.amp.scaler import LossScaler
from ampfuse.optim.param_groups import check_optimizer, is_empty
from ampfuse.torch_utils import dynamo_disable

_log = logging.getLogger("ampfuse.amp")
_CALL = "amp.scale_loss(loss, optimizer)"
P = ParamSpec("P")


class _Block(contextlib._GeneratorContextManager[Tensor]):
    """The result of ``scale_loss``, which is for a ``with`` statement and is not a loss."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"amp.scale_loss is a context manager, which has no {name!r}. Write "
            "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`."
        )


def loss_block(function: Callable[P, Any]) -> Callable[P, _Block]:
    """Decorator: ``contextlib.contextmanager`` whose result explains a missing ``with``."""
    return functools.wraps(function)(lambda *args, **kwargs: _Block(function, args, kwargs))


@dynamo_disable
@loss_block
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """Scale `loss` for the backward pass inside the ``with`` block.

    Gradients of several passes before a ``step`` add up, unscaled and in FP32, also when they were
    made with different scales. If a gradient of a pass is non-finite and scaling is dynamic, all of
    `optimizers`, and no others, skip their next step. ``step`` belongs after the block.

    Arguments:
        loss: the loss, of any shape; computed on in FP32.
        optimizers: one or several; every optimizer whose parameters this pass gives gradients to.
        loss_id: which of the ``num_losses`` scalers of ``initialize`` to use.
        model: ignored, as in apex.
        delay_unscale: leave it to the next pass to adapt the scale to an overflow of this one.
            Gradients read unscaled, and accumulation is right, without it and with it.
        delay_overflow_check: neither look for overflow in this pass nor adapt the scale.

    Yields:
        ``loss.float() * scale``; `loss` itself where amp is off.

    Raises:
        RuntimeError: an optimizer did not go through ``initialize``, or is in such a block already.
        TypeError: no loss, or no optimizers.
        IndexError: no scaler has this `loss_id`.

    Source: the semantics of ``apex.amp.scale_loss``.
    """
    if isinstance(loss, Optimizer):
        check_optimizer(optimizers, _CALL)
    session, optimizers = session_and_optimizers(optimizers)
    if session.policy is None:
        yield loss
        return
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss must be a tensor, not {type(loss).__name__}.")
    if not 0 <= loss_id < len(session.loss_scalers):
        raise IndexError(
            f"loss_id={loss_id}, but amp.initialize created {len(session.loss_scalers)} loss "
            "scaler(s). Pass num_losses to amp.initialize; ids count from 0."
        )
    optimizers = list[Any](each for each in optimizers if not is_empty(each))
    if any(optimizer.in_backward for optimizer in optimizers):
        raise RuntimeError(
            "amp.scale_loss blocks of one optimizer cannot be nested: leave the first block, "
            "then enter the second. Their gradients accumulate."
        )
    has_cast = cast_state.forward_ran or cast_state.thread.everywhere
    if session.policy.autocast_type is not None and loss.requires_grad and not has_cast:
        _warn_of_missing_casts(session.policy.opt_level)

    scaler = session.loss_scalers[loss_id]
    # With FP32 weights and a static scale of 1 the gradients are what they should be already.
    if not session.policy.model_is_low_precision and scaler.is_always_one:
        scaling: AbstractContextManager[Tensor] = contextlib.nullcontext(loss.float())
    else:
        scaling = scaled_pass(loss, optimizers, scaler, delay_unscale, delay_overflow_check)
    for optimizer in optimizers:  # in the block their steps and other scale_loss blocks raise
        optimizer.in_backward = True
    try:
        with scaling as scaled, cast_state.off_if_everywhere():
            yield scaled
    finally:
        for optimizer in optimizers:
            optimizer.in_backward = False
    # apex's message: for it the host waits for the device.
    if session.verbosity >= 2 and scaler.dynamic and any(o.found_inf_flag for o in optimizers):
        _log.warning(
            "Gradient overflow. Skipping step; loss scale %d is now %.10g.",
            loss_id,
            scaler.loss_scale(),
        )
    # The weights are about to change. Autocast drops its casts of them when its region ends, but a
    # region of the user's may span the whole loop.
    torch.clear_autocast_cache()
    if session.after_pass is not None:
        session.after_pass(session, loss_id, optimizers, delay_unscale, delay_overflow_check)


def session_and_optimizers(optimizers: Any) -> tuple[sessions.Session, list[Any]]:
    """The session and the list of optimizers. With amp off, `optimizers` may be anything."""
    ones = (Optimizer, nn.Module, Tensor)
    is_one = isinstance(optimizers, ones) or not isinstance(optimizers, Iterable)
    listed = [optimizers] if is_one else list(optimizers)
    try:
        return sessions.of_optimizers(listed) if listed else sessions.latest(), listed
    except RuntimeError:
        for one in listed:
            check_optimizer(one, _CALL)
        raise


@contextlib.contextmanager
def scaled_pass(
    loss: Tensor,
    optimizers: Sequence[Any],
    scaler: LossScaler,
    delay_unscale: bool,
    delay_overflow_check: bool,
) -> Iterator[Tensor]:
    """Block with a backward pass of `optimizers` and `scaler`; see :func:`scale_loss`."""
    check = scaler.dynamic and not delay_overflow_check
    scale = scaler.snapshot(loss.device)  # that of this pass, whatever another one does meanwhile
    begun: list[Any] = []
    # Whether a pass gave any gradients here, and whether the scale may react to it.
    any_gradient = may_update_scale = False
    watch = _Watch()
    try:
        for optimizer in optimizers:
            gradients = optimizer.param_table().gradients
            gradients.begin_backward()
            begun.append((optimizer, gradients))
        groups = no_sync.average_earlier(optimizers)
        scaled = loss.float() * scale
        if scaled.requires_grad:
            scaled.register_hook(watch)
        yield scaled
        for _, gradients in begun[1:]:  # all take the pass in, or none
            gradients.check()
        while begun:
            optimizer, _ = begun[0]
            left_here = optimizer.end_backward(scale, check, delay_unscale)
            any_gradient |= left_here
            # FSDP keeps gradients until a pass that it synchronises. They carry the scale, which
            # must not change between.
            may_update_scale |= left_here or not optimizer.has_shards
            del begun[0]
    except BaseException:
        for _, gradients in begun:
            gradients.cancel_backward()
        raise
    finally:
        watch.is_over = True
    if any_gradient and scaled.requires_grad and not watch.was_used:
        warnings.warn(
            "The gradients of this scale_loss block did not come from the scaled loss, but are "
            "divided by the loss scale all the same. Call backward() on the loss it yields: "
            "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()",
            stacklevel=5,
        )
    if may_update_scale and not (delay_unscale or delay_overflow_check):
        # The scale reacts to this pass alone; a step skips after any overflow since the last step.
        of_pass = [optimizer.pass_found_inf_flag for optimizer in optimizers]
        since_step = [optimizer.found_inf_flag for optimizer in optimizers]
        if groups and check:
            no_sync.share([*of_pass, *since_step], groups)
        scaler.update(of_pass, since_step)


class _Watch:
    """A hook of the scaled loss, which records whether its backward pass came within the block."""

    was_used = is_over = False

    def __call__(self, gradient: Tensor) -> None:
        self.was_used = True
        if self.is_over:
            raise RuntimeError(
                "backward() was called on a scaled loss after its scale_loss block, where the "
                "gradients would stay scaled. Call scaled_loss.backward() inside the with block."
            )


def _warn_of_missing_casts(level: str) -> None:
    """Warn, once, that nothing was cast because no ``forward`` ran."""
    cast_state.mark_forward()
    warnings.warn(
        f"{level} casts inside the forward() of the models passed to amp.initialize, and none of "
        "them has run since: this loss was computed without casts. If your loop calls submodules "
        "or other methods (training_step, loss), call amp.cast_everywhere() after amp.initialize.",
        stacklevel=4,
    )
