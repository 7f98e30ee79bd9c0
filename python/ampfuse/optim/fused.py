"""The fused step: unscale, overflow check, clip, update and cast back, in two passes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from ampfuse.optim.checks import ABOVE_0, COUNT, FINITE, NUMBER, check
from ampfuse.optim.ema import Averages
from ampfuse.optim.hyper import Asked, check_range
from ampfuse.optim.masters import FLOAT_DTYPES
from ampfuse.optim.options import (
    NOT_IN_GROUPS,
    NOT_IN_OTHERS_GROUPS,
    RULES,
    Options,
    changed_too_late,
    check_group,
    check_options,
    values_of,
)
from ampfuse.optim.schedule import Scheduled, refuse_unread
from ampfuse.uncompiled import uncompiled

if TYPE_CHECKING:
    from ampfuse._C import ParamTable

# What ``upgrade`` makes of torch's optimizers.
FUSED: dict[type[torch.optim.Optimizer], type[FusedOptimizer]] = {}


class FusedOptimizer(Scheduled, Averages):
    """Base of the optimizers whose update is a kernel of ours.

    A subclass names its kernel (`_algorithm`), says which state a parameter of a group has
    (:class:`States`), and gives the kernel's hyper-parameters (`_hyper`, by the names of
    ``ParamTable.set_hyper``, and ``lr``, which may be a tensor). With the class argument `replaces`
    it stands in, under amp, for that class of torch, from which it also inherits.

    In a subclass whose step calls no other, amp and GradScalers see an optimizer like any other.
    """

    def __init_subclass__(
        cls, *, replaces: type[torch.optim.Optimizer] | None = None, **kwargs: Any
    ) -> None:
        if not cls._has_own_step and _has_own_step(cls):
            cls._has_own_step, cls._step_supports_amp_scaling = True, False
        super().__init_subclass__(**kwargs)
        if replaces is not None:
            FUSED[replaces] = cls

    # Whether half gradients are left unscaled as FP32 ones are, rounded.
    _unscales_half = False

    # Whether a step follows the norm of each tensor by itself, so that LARC has no place around it.
    _follows_norms = False

    # Clip the next step to this L2 norm instead of `max_grad_norm`.
    clip_once: float | None = None
    # What the table has: of each group the rate's tensor, the schedule, its rows and `_hyper`.
    _hyper_sent: list[Any]

    def _set_options(self, options: Options, arguments: dict[str, Any]) -> None:
        """Set the options that a constructor was given, and look at its other arguments.

        Raises TypeError for an unknown option, and ValueError.
        """
        for name, value in options.items():
            if name not in RULES:
                call = f"{type(self).__name__}.__init__()"
                raise TypeError(f"{call} got an unexpected keyword argument {name!r}")
            check(name, value, RULES[name])
            is_flag = isinstance(getattr(FusedOptimizer, name), bool)
            setattr(self, name, bool(value) if is_flag and value != "split" else value)
        check_options({name: getattr(self, name) for name in RULES})
        self._takes_options = True
        check_range(self._checked_hyper(arguments))

    def check_options(self) -> None:
        """Raise ValueError for options and groups that were changed to what they cannot be."""
        now = values_of(self)
        if now != self._checked:
            options = dict(zip(RULES, now, strict=True))
            check_options(options)
            for name, value in self._made_with.items() if self._table is not None else ():
                if options[name] != value:
                    raise ValueError(changed_too_late(name, value, options[name]))
            self._checked = now
        for group in self.param_groups:
            if not NOT_IN_GROUPS.isdisjoint(group):
                check_group(group, self._whole_options())

    # Of a group: keys of other people stay free, but for those that only options of ours have.
    def _whole_options(self) -> dict[str, Any]:
        names = NOT_IN_GROUPS if self._takes_options else NOT_IN_OTHERS_GROUPS
        return {name: getattr(self, name) for name in names}

    def _check_loaded(self, group: dict[str, Any]) -> None:
        for name, value in self._checked_hyper(group).items():
            check(name, value, FINITE)
        check("schedule_step", group.get("schedule_step", 0), COUNT)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_group(group, self._whole_options())
        self._mode_of(group)
        self._checked_hyper(group)
        if group.get("differentiable"):
            raise ValueError(
                "differentiable=True needs an update that autograd records, and a fused one is "
                f"not. Use torch.optim.{type(self).__name__}."
            )
        for param in group["params"]:
            if param.dtype not in FLOAT_DTYPES:
                raise TypeError(
                    f"a parameter of shape {tuple(param.shape)} is {param.dtype}; "
                    f"ampfuse.optim.{type(self).__name__} steps float32, float16 and bfloat16. "
                    "Convert the model, or use torch.optim for it."
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; see the class for what it does with masters, clipping and overflow.

        Arguments:
            closure: reevaluates the model under ``torch.enable_grad`` and returns the loss.

        Returns:
            What the closure returned, else None. Whether the step was applied is in
            ``last_step.skipped``, on the device.

        Raises:
            RuntimeError: inside a scale_loss context; a sparse gradient; tensors on several
                devices or on meta; under amp, hundreds of steps in a row that were all skipped.
                TypeError: a float64 or complex gradient. ValueError: an option or hyper-parameter
                was changed to what it cannot be. Nothing has changed then.
        """
        self._check_gradients_are_unscaled()
        self._check_not_swapped("step()")
        self.check_options()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        table = self.param_table()
        try:
            self.keep_bound()
            self._send_hyper()
        except (RuntimeError, TypeError, ValueError):
            for group in self.param_groups:
                self._checked_hyper(group)
            raise
        stateless = self._collect(table)
        for row in stateless:
            self._init_state(row)
        if stateless:
            self._remember_bindings()
        max_norm, self.clip_once = self.clip_once or self.max_grad_norm or 0.0, None
        metered = None if self._meter is None else self._meter.before_update(table)
        table.update(**self._verdict(max_norm), meter=metered)
        if metered is not None:
            self.meter.after_update(table, metered)
        if torch.is_autocast_enabled(self._row_params[0].device.type):
            torch.clear_autocast_cache()  # it may hold casts of the weights as they were
        self._watch_skips()
        return loss

    @uncompiled
    @torch.no_grad()
    def clip_next_step(self, max_norm: float) -> Tensor:
        check("max_norm", max_norm, ABOVE_0)
        table = self.param_table()
        self._collect(table)
        table.measure()
        self.clip_once = float(max_norm)
        return table.state_field("sum_squares").sqrt().to(torch.float32)

    def _collect(self, table: ParamTable) -> list[int]:
        """Tell `table` of the gradients and their scale; the rows with a gradient but no state."""
        scale = self.__dict__.get("grad_scale")
        return table.collect(scale, self.unscale_grads, self._unscales_half)

    # --- hyper-parameters -----------------------------------------------------------------------

    def _bind_states(self) -> None:
        for group in self.param_groups:
            self._checked_hyper(group)
        self._hyper_sent = []
        super()._bind_states()

    def _send_hyper(self) -> None:
        """Give the table each group's hyper-parameters, if they changed."""
        schedule = self._schedule
        row = 0
        for i, group in enumerate(self.param_groups):
            end = row + len(group["params"])
            lr, hyper = self.lr_and_hyper(group)
            table = schedule.of_group(i) if schedule is not None else {}
            sent: Any = self._hyper_sent[i] if i < len(self._hyper_sent) else None
            known = sent is not None and sent[0] is lr and sent[1] is schedule
            if not known or sent[2:] != (row, end, hyper):
                if not known or {**sent[-1], "lr": hyper["lr"]} != hyper:
                    self._checked_hyper(group)
                if known:
                    refuse_unread(i, sent[-1], hyper, table)
                self._known_table().set_hyper(row, end, lr, hyper, table)
                del self._hyper_sent[i:]
                self._hyper_sent.append((lr, schedule, row, end, hyper))
            row = end

    def _checked_hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        """`_hyper`. Raises ValueError for what is of a wrong type, of all that a step reads."""
        asked = Asked(group)
        try:
            hyper = self._hyper(asked)
            self._state_names(asked)
        finally:
            asked.check()
        return hyper

    def lr_and_hyper(self, group: dict[str, Any]) -> tuple[Tensor | None, dict[str, Any]]:
        """The rate, if the kernel reads it from a tensor on the device, and all the rest."""
        hyper = self._hyper(group)
        if self.seed:
            hyper["seed"] = float(self.seed)
        if self.ema_decay is not None:
            hyper["ema_decay"] = float(self.ema_decay)
        if self._layerwise is not None:
            hyper.update(self._layerwise.hyper)
        lr = hyper["lr"]
        if not isinstance(lr, Tensor):
            if type(lr) is not float:
                check("lr", lr, NUMBER)
            return None, hyper
        on_device = lr.device == self._row_params[0].device and lr.dtype == torch.float32
        hyper["lr"] = 0.0 if on_device else float(lr)
        return (lr if on_device else None), hyper


def is_fused(optimizer: torch.optim.Optimizer) -> TypeGuard[FusedOptimizer]:
    """Whether the optimizer's step is ours, or a subclass's that calls ours."""
    return isinstance(optimizer, FusedOptimizer) and not optimizer._has_own_step


def _has_own_step(cls: type) -> bool:
    """Whether some class has put a step before ours that calls no other, by its code."""
    ours = inspect.unwrap(FusedOptimizer.step)  # torch wraps it anew for each class
    steps = (inspect.unwrap(vars(kind)["step"]) for kind in cls.__mro__ if "step" in vars(kind))
    first = next(s for s in steps if s is ours or not _names_step(getattr(s, "__code__", None)))
    return first is not ours


def _names_step(code: CodeType | None) -> bool:
    """Whether code, or a function in it, looks up a ``step``. What has no code might."""
    if code is None or "step" in code.co_names:
        return True
    return any(_names_step(const) for const in code.co_consts if isinstance(const, CodeType))
