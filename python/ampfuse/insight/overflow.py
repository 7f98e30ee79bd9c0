"""``amp.explain_overflow``: watch one step, or the one after too many that were skipped."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampfuse.insight.explanation import Explanation
from ampfuse.insight.tracker import Tracker
from ampfuse.optim.base import amp_optimizers
from ampfuse.torch_utils import Sample, dynamo_disable, is_captured

_log = logging.getLogger("ampfuse.amp")


def explain_overflow(
    model: nn.Module,
    optimizer: Optimizer | torch.amp.GradScaler | None = None,
    *,
    after: int | None = None,
) -> OverflowWatch:
    """Find the module and the operation that made the first inf or NaN of a training step.

    Around any step, its forward pass, backward pass and update::

        with amp.explain_overflow(model) as watch:
            ...
        print(watch.explanation)  # an Explanation; None if all that matters was finite

    With `after` it arms itself: after that many skipped steps in a row the next step is watched,
    from its forward pass on, and the explanation is logged (logger "ampfuse.amp", WARNING). It
    reports again once steps were applied in between. If the watched step, which runs uncompiled, is
    finite, but `after` compiled steps in a row after it are skipped, the log says that only the
    compiled program overflows.

    A watched step runs every operation as always and gives the same bits, but synchronizes with
    the device after each of them. Compiled code runs uncompiled in it. An armed watch adds nothing
    to a step but a count of skipped steps on the device, without synchronization.

    Arguments:
        model: a module, whatever it is wrapped in. Names are those of its ``named_modules()``.
        optimizer: what reports skipped steps: an optimizer of ampfuse, or one that went through
            ``amp.initialize``; with another one the GradScaler. Needed with `after` only.
        after: how many skipped steps in a row it takes.

    Raises:
        TypeError: no module; with `after`, an optimizer that does not report skipped steps.
        ValueError: `after` is not a positive integer.

    Kernels that torch does not dispatch (Triton's, CUDA graphs) are seen by their results only.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, not {type(model).__name__}.")
    watch = OverflowWatch(model)
    if after is not None:
        if not (isinstance(after, int) and after >= 1):
            raise ValueError(f"after must be an integer and at least 1, got {after!r}.")
        watch._arm(optimizer, after)
    return watch


class OverflowWatch:
    """The result of :func:`explain_overflow`.

    Attributes:
        explanation: of the latest watched step; None if there was none, or all was finite.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.explanation: Explanation | None = None
        self._tracker: Tracker | None = None
        self._armed = contextlib.ExitStack()  # what `remove` takes away
        self._waiting = contextlib.ExitStack()  # hooks that begin a watched step

    def __enter__(self) -> OverflowWatch:
        if self._tracker is not None:
            raise RuntimeError("This watch is already in a with block.")
        self.explanation = None
        self._tracker = Tracker(self.model)
        self._tracker.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        tracker, self._tracker = self._tracker, None
        assert tracker is not None
        tracker.__exit__(*error)
        self.explanation = tracker.explanation()

    def remove(self) -> None:
        """Disarm: nothing is watched any more."""
        self._armed.close()
        self._waiting.close()
        if self._tracker is not None:
            self.__exit__()

    # --- armed ------------------------------------------------------------------------------------

    def _arm(self, optimizer: Any, after: int) -> None:
        self._skips = SkipsInARow(after)
        if isinstance(optimizer, torch.amp.GradScaler):
            self._armed.callback(call_after_updates(optimizer, self._after_step))
            return
        tells = amp_optimizers(optimizer) if isinstance(optimizer, Optimizer) else []
        if not tells:
            raise TypeError(
                f"{type(optimizer).__name__} does not report skipped steps. Pass the GradScaler "
                "instead, or the optimizer that went through amp.initialize."
            )

        def after_step(one: Any, args: Any, kwargs: Any) -> None:
            self._after_step(one.last_step.skipped)

        self._armed.callback(tells[-1].register_step_post_hook(after_step).remove)

    def _after_step(self, skipped: Tensor) -> None:
        if self._tracker is not None:
            self.__exit__()
            if self.explanation is not None:
                _log.warning("Skipped steps in a row: %d. %s", self._skips.count, self.explanation)
            elif _has_compiled() and not is_captured(skipped) and not skipped.item():
                self._skips = SkipsInARow(self._skips.after, since_eager=True)
                return
        if not self._skips.are_enough(skipped):
            return
        if self._skips.since_eager and self._skips.are_all:
            _log.warning(_ONLY_COMPILED, self._skips.count)
        else:
            for module in self.model.modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    hook = module.register_forward_pre_hook(self._begin, with_kwargs=True)
                    self._waiting.callback(hook.remove)

    @dynamo_disable
    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():  # no training
            return
        self._waiting.close()
        self.__enter__()
        assert self._tracker is not None
        # The tracker's own hook is too late for the call that is being made.
        self._tracker.enter_module(module, args, kwargs)
        hook = module.register_forward_hook(self._end_if_failed, always_call=True)
        self._tracker.on_exit(hook.remove)

    def _end_if_failed(self, *_: Any) -> None:
        if sys.exc_info()[0] is not None and self._tracker is not None:
            self.__exit__()
            self._skips.has_reported = False


def call_after_updates(
    scaler: torch.amp.GradScaler, callback: Callable[[Tensor], None]
) -> Callable[[], None]:
    """Have ``callback(skipped)`` called after each ``scaler.update()`` that follows a step.

    `skipped` is 1 on the device if a gradient was not finite. Returns the function that ends it.
    """
    before, update = vars(scaler).get("update"), scaler.update
    has_ended = not scaler.is_enabled()

    def update_and_call(*args: Any, **kwargs: Any) -> None:
        if has_ended:
            return update(*args, **kwargs)
        states = scaler._per_optimizer_states.values()
        flags = [flag for state in states for flag in state["found_inf_per_device"].values()]
        here = [flag.to(flags[0].device, non_blocking=True) for flag in flags]
        update(*args, **kwargs)
        if here:
            callback(torch.stack(here).amax())

    def end() -> None:
        nonlocal has_ended
        has_ended = True
        if vars(scaler).get("update") is not update_and_call:
            return  # another watch was armed later, and calls this one
        if before is None:
            del scaler.update
        else:
            scaler.update = before  # type: ignore[method-assign]

    scaler.update = update_and_call  # type: ignore[method-assign]
    return end


_ONLY_COMPILED = (
    "Skipped steps in a row: %d. Only the compiled program overflows: the step before them ran "
    "uncompiled, at a loss scale at least as high, and was finite. If it is finite with "
    'torch.compile(..., backend="aot_eager") too, Inductor is the cause: with the option '
    '{"emulate_precision_casts": True} it rounds as uncompiled code does. To exclude a part from '
    "compilation, use torch.compiler.disable."
)


def _has_compiled() -> bool:
    """Return whether code that torch.compile made has run in this process."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    return dynamo is not None and dynamo.utils.counters["frames"]["ok"] > 0


class SkipsInARow:
    """Counts skipped steps in a row, on the device, without synchronization.

    `since_eager` says that the count began after a finite step that ran uncompiled.
    """

    def __init__(self, after: int, *, since_eager: bool = False) -> None:
        self.after, self.since_eager = after, since_eager
        self.count = 0  # as far as it is known here
        self.are_all = False  # of the steps since it began
        self.has_reported = False
        self._steps = self._sampled_at = 0
        self._on_device: Tensor | None = None
        self._sample: Sample | None = None

    def are_enough(self, skipped: Tensor) -> bool:
        """Count a step, and return True once when `after` in a row were `skipped` for overflow."""
        if is_captured(skipped):
            return False
        self._steps += 1
        before = 0 if self._on_device is None else self._on_device
        self._on_device = (before + 1) * (skipped == 1)
        if self._sample is None:
            self._sample, self._sampled_at = Sample(self._on_device), self._steps
        if not self._sample.has_arrived():
            return False
        self.count, self._sample = int(self._sample.values()[0]), None
        self.are_all = self.count == self._sampled_at
        is_new = self.count >= self.after and not self.has_reported
        self.has_reported = self.count >= self.after
        return is_new
