"""Any other optimizer under amp: FP32 masters and scaling around a step of its own."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampfuse.optim.base import AmpOptimizer, tells_schedulers
from ampfuse.optim.masters import MasterParameter
from ampfuse.optim.param_groups import is_empty, parameters
from ampfuse.uncompiled import uncompiled


class GenericOptimizer(AmpOptimizer):
    """What :func:`ampfuse.optim.upgrade` puts in front of an optimizer's class.

    The wrapped step runs on FP32 masters with unscaled FP32 gradients; afterwards the model
    weights are the masters, rounded. Such a step is host code, so where an overflow skips it the
    host has to know whether to run it, and reads that once per step, as torch's GradScaler does.
    """

    # Also where a subclass of a fused optimizer has a step of its own.
    _step_supports_amp_scaling = True
    _algorithm = "none"
    _original_class: type[torch.optim.Optimizer]

    @tells_schedulers
    @uncompiled
    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The original class's step, unless the gradients overflowed; then nothing, and None.

        Autocast is off in it; in a closure it is as it was outside.
        """
        self._opt_called = True
        self._check_before_step()
        step: Any = self._original_class.step
        # torch wraps step once more for this class, so that hooks would run twice.
        step = step.__wrapped__ if getattr(step, "hooked", False) else step
        if is_empty(self):
            return step(self, *args, **kwargs)
        table = self.param_table()
        scale = self.__dict__.get("grad_scale")
        if scale is not None:
            self.unscale_gradients(scale)
        table.masters.refresh()
        table.plan.collect(None, False)
        verdict = self._verdict(0.0)
        table.plan.decide(**verdict)
        may_skip = verdict["skip_nonfinite"]
        if may_skip and table.inspector.state_field("skip").item():
            table.plan.finish_step()
            self._watch_skips(True)
            return None
        table.gradients.materialize(all=True)
        # The gradients are unscaled; torch's own steps would read these too, and some refuse them.
        driven = {key: self.__dict__.pop(key) for key in _FROM_SCALER if key in self.__dict__}
        larc, self._layerwise = self._layerwise, None
        try:
            layerwise = larc.rescaled(self) if larc is not None else contextlib.nullcontext()
            if args and callable(args[0]):
                args = (self._after_publishing(args[0]), *args[1:])
            elif callable(kwargs.get("closure")):
                kwargs["closure"] = self._after_publishing(kwargs["closure"])
            with layerwise, torch.autocast(table.param(0).device.type, enabled=False):
                result = step(self, *args, **kwargs)
        finally:
            self.__dict__.update(driven)
        if not isinstance(self, GenericOptimizer):  # it called a fused step, which did the rest
            return result
        table.masters.publish()
        table.plan.finish_step()
        if may_skip:
            self._watch_skips()
        return result

    def _after_publishing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure evaluates the model, so the model has to follow the masters first."""
        device_type = self._rows.params[0].device.type
        as_outside = torch.autocast(
            device_type,
            dtype=torch.get_autocast_dtype(device_type),
            enabled=torch.is_autocast_enabled(device_type),
        )

        def closure_on_current_weights() -> Any:
            self._rows.known().masters.publish()
            with as_outside:
                return closure()

        return closure_on_current_weights

    @uncompiled
    def clip_next_step(self, max_norm: float) -> Tensor:
        # The wrapped step reads .grad, so the gradients themselves have to be clipped.
        return torch.nn.utils.clip_grad_norm_(list(parameters(self)), max_norm)

    @uncompiled
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The original class's, if it has its own: what that takes and leaves is its choice."""
        original = self._original_class.zero_grad
        if original is torch.optim.Optimizer.zero_grad:
            super().zero_grad(*args, **kwargs)
            return
        original(self, *args, **kwargs)
        for param in parameters(self):  # a dropped gradient of a master is its weight's too
            if isinstance(param, MasterParameter) and param.grad is None:
                param.grad = None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _new, (self._original_class,), self.__getstate__()


_FROM_SCALER = ("grad_scale", "found_inf")


@functools.cache
def generic_class(original: Any) -> type[GenericOptimizer]:
    """`original` with amp's mixin in front; one class per original, under its name."""
    own = {name: _called_as(original, name) for name in ("step", "zero_grad")}
    own |= {"__module__": original.__module__, "_original_class": original}
    return type(original.__name__, (GenericOptimizer, original), own)


def _called_as(original: Any, name: str) -> Any:
    """Our method `name`, with the signature that the original class's has."""
    ours = getattr(GenericOptimizer, name)

    @functools.wraps(ours)
    def method(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    with contextlib.suppress(ValueError):  # one that is compiled may have none
        method.__signature__ = inspect.signature(getattr(original, name))  # type: ignore[attr-defined]
    return method


def _new(original: Any) -> GenericOptimizer:
    return object.__new__(generic_class(original))
