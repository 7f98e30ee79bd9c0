"""Turn an existing optimizer, in place, into one that amp can scale, inspect and skip.

An optimizer of torch that has a fused counterpart becomes that. Any other keeps its own step, which
gets FP32 masters and loss scaling (:class:`GenericOptimizer`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ampfuse.optim.base import AmpOptimizer, tells_schedulers
from ampfuse.optim.fused import FUSED, FusedOptimizer, is_fused
from ampfuse.optim.larc import LARC
from ampfuse.optim.masters import MASTERS, MasterParameter
from ampfuse.optim.options import check_options
from ampfuse.optim.param_groups import is_empty, parameters, with_wrapped
from ampfuse.torch_utils import dynamo_disable


def upgrade(
    optimizer: torch.optim.Optimizer,
    *,
    master_weights: bool | Literal["split"],
    names: dict[int, str] | None = None,
) -> None:
    """Make `optimizer` amp-aware in place: the same object, of a subclass of its class.

    Exactly ``torch.optim.SGD``, ``Adam``, ``AdamW``, ``Adagrad`` and ``Muon`` become fused; every
    other optimizer keeps its own step (:class:`GenericOptimizer`). A LARC stays what it is, and the
    optimizer that it wraps changes. Learning-rate schedulers and hooks keep working, whether they
    were made before or are made after.

    Arguments:
        master_weights: replace half parameters in ``param_groups`` by FP32 masters; ``"split"``,
            for fused optimizers: keep them there, and the rest of each master in the state.
        names: parameter names for messages, by ``id`` of the parameter.

    Raises:
        TypeError: a parameter is neither float32, float16 nor bfloat16; ``"split"`` for an
            optimizer that is not fused.
        ValueError: `master_weights` has a wrong value, or does not go with the options of
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
            optimizer.note_third_party_keys()
    assert isinstance(optimizer, AmpOptimizer)
    optimizer.go_under_amp(master_weights=master_weights, names=names or {})
    if not master_weights:
        _drop_masters(optimizer)


def check_upgrade(
    optimizer: torch.optim.Optimizer, master_weights: bool | Literal["split"]
) -> None:
    """Raise TypeError or ValueError for what :func:`upgrade` cannot do."""
    check_options({"master_weights": master_weights})
    stepper = with_wrapped(optimizer)[-1]
    if master_weights == "split" and fused_class(stepper) is None:
        raise TypeError(
            f"master_weights='split' needs a fused optimizer, but {type(stepper).__name__} has "
            "a custom step(). Use an optimizer of ampfuse.optim, or master_weights=True."
        )
    if is_fused(stepper):
        check_options({"rounding": stepper.rounding, "master_weights": master_weights})


def fused_class(optimizer: torch.optim.Optimizer) -> type[FusedOptimizer] | None:
    """The fused class that `optimizer` has or gets; None if it keeps its own step."""
    if is_fused(optimizer):
        return type(optimizer)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return None
    return FUSED.get(type(optimizer))  # by exact type: a subclass may step differently


def _drop_masters(optimizer: torch.optim.Optimizer) -> None:
    """Drop masters of a checkpoint that was loaded before: no step would update them."""
    for each in with_wrapped(optimizer):
        for state in getattr(each, "state", {}).values():
            if isinstance(state, dict):
                for key in MASTERS & state.keys():
                    del state[key]


def _follow_class(optimizer: torch.optim.Optimizer) -> None:
    """Update what torch keeps per class or per instance after a change of class."""
    # Step hooks live in a wrapper that torch puts on the class. This also makes what a class that
    # does not call torch's constructor lacks: the lists of hooks, at least.
    optimizer.__dict__.setdefault("defaults", {})
    torch.optim.Optimizer.__setstate__(optimizer, {})
    if isinstance(optimizer, FusedOptimizer):
        optimizer.state = optimizer.state
    step = optimizer.__dict__.get("step")
    if getattr(step, "_wrapped_by_lr_sched", False):
        # A scheduler built earlier wrapped the old class's step, to see that step was called.
        del optimizer.__dict__["step"]


class GenericOptimizer(AmpOptimizer):
    """The class that :func:`ampfuse.optim.upgrade` puts in front of an optimizer's class.

    The wrapped step runs on FP32 masters with unscaled FP32 gradients; afterwards the model
    weights are the masters, rounded. Such a step is host code. Where an overflow skips it, the
    host must know whether to run it, so it reads the flag once per step, as torch's GradScaler
    does.
    """

    # Also where a subclass of a fused optimizer overrides `step`.
    _step_supports_amp_scaling = True
    _algorithm = "none"
    _original_class: type[torch.optim.Optimizer]

    @tells_schedulers
    @dynamo_disable
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
        _check_rates(self)
        table = self.param_table()
        scale = self.__dict__.get("grad_scale")
        if scale is not None:
            self.unscale_gradients(scale)
        table.masters.refresh()
        table.plan.collect(None, False)
        table.plan.decide(**self._skip_decision(0.0))
        if self.may_have_skipped and table.inspector.state_field("skip").item():
            table.plan.finish_step()
            self._watch_skips(True)
            return None
        table.gradients.materialize(all=True)
        # The gradients are unscaled; torch's own steps would use these too, and some raise.
        flags = {key: self.__dict__.pop(key) for key in _FROM_SCALER if key in self.__dict__}
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
            self.__dict__.update(flags)
        if not isinstance(self, GenericOptimizer):  # the step called a fused one: all is done
            return result
        table.masters.publish()
        table.plan.finish_step()
        self._watch_skips()
        return result

    def _after_publishing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure evaluates the model, so the model must get the masters' values first."""
        device_type = self._rows.params[0].device.type
        as_outside = torch.autocast(
            device_type,
            dtype=torch.get_autocast_dtype(device_type),
            enabled=torch.is_autocast_enabled(device_type),
        )

        def closure_on_current_weights() -> Any:
            self._rows.existing_table().masters.publish()
            with as_outside:
                return closure()

        return closure_on_current_weights

    @dynamo_disable
    def clip_next_step(self, max_norm: float) -> Tensor:
        # The wrapped step reads .grad, so the gradients themselves must be clipped.
        return torch.nn.utils.clip_grad_norm_(list(parameters(self)), max_norm)

    @dynamo_disable
    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The original class's, if it has its own, with its arguments and effects."""
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


def _check_rates(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for a learning rate that is NaN, unless it is a tensor on another device."""
    for group in optimizer.param_groups:
        rate: Any = group.get("lr")
        is_known = isinstance(rate, float) or (isinstance(rate, Tensor) and rate.is_cpu)
        if is_known and math.isnan(rate):
            raise ValueError("Invalid learning rate: nan")


_FROM_SCALER = ("grad_scale", "found_inf")


@functools.cache
def generic_class(original: Any) -> type[GenericOptimizer]:
    """`original` with :class:`GenericOptimizer` in front; one class per original, with its name."""
    own = {name: _called_as(original, name) for name in ("step", "zero_grad")}
    own |= {"__module__": original.__module__, "_original_class": original}
    return type(original.__name__, (GenericOptimizer, original), own)


def _called_as(original: Any, name: str) -> Any:
    """The method `name` of GenericOptimizer, with the signature of the original class's."""
    ours = getattr(GenericOptimizer, name)

    @functools.wraps(ours)
    def method(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    with contextlib.suppress(ValueError):  # one that is compiled may have none
        method.__signature__ = inspect.signature(getattr(original, name))  # type: ignore[attr-defined]
    return method


def _new(original: Any) -> GenericOptimizer:
    return object.__new__(generic_class(original))
