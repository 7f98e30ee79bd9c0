"""The fused step: unscale, overflow check, clip, update and cast back, in two passes."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from functools import cached_property
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ampfuse._schema import ALGORITHMS, Algorithm
from ampfuse.optim.base import AmpOptimizer, tells_schedulers
from ampfuse.optim.checks import ABOVE_0, COUNT, FINITE, NUMBER, check
from ampfuse.optim.hyper import Hypers, check_hyper, check_range, kernel_hyper
from ampfuse.optim.masters import FLOAT_DTYPES
from ampfuse.optim.options import (
    NOT_IN_GROUPS,
    NOT_IN_OTHERS_GROUPS,
    RULES,
    changed_too_late,
    check_group,
    check_options,
    values_of,
)
from ampfuse.optim.schedule import Schedule, tabulate
from ampfuse.optim.states import CLASSES, States
from ampfuse.uncompiled import uncompiled

if TYPE_CHECKING:
    from ampfuse._C import ParamTable

# What ``upgrade`` makes of torch's optimizers.
FUSED: dict[type[torch.optim.Optimizer], type[FusedOptimizer]] = {}


class FusedOptimizer(AmpOptimizer):
    """Base of the optimizers whose update is a kernel of ours.

    A subclass names its kernel by the class argument `algorithm`; states and hyper-parameters are
    the schema's. With `replaces` it stands in, under amp, for that class of torch, from which it
    also inherits.

    In a subclass whose step calls no other, amp and GradScalers see an optimizer like any other.
    """

    # The class of torch that it stands in for.
    _replaces: type[torch.optim.Optimizer] | None = None
    # Whether half gradients are left unscaled as FP32 ones are, rounded.
    _unscales_half = False
    # What parameters without a state count as having made.
    _first_step = 0
    # Clip the next step to this L2 norm instead of `max_grad_norm`.
    clip_once: float | None = None
    # The options as a step last found them.
    _checked: tuple[Any, ...] | None = None
    # What the steps follow.
    _schedule: Schedule | None = None

    _states = cached_property(States)
    _hypers = cached_property(Hypers)

    def __init_subclass__(
        cls,
        *,
        algorithm: str | None = None,
        replaces: type[torch.optim.Optimizer] | None = None,
        **kwargs: Any,
    ) -> None:
        if not cls._has_own_step and _has_own_step(cls):
            cls._has_own_step, cls._step_supports_amp_scaling = True, False
        super().__init_subclass__(**kwargs)
        if algorithm is not None:
            cls._algorithm, cls._replaces = algorithm, replaces
            CLASSES.append((algorithm, cls.__name__))
        if replaces is not None:
            FUSED[replaces] = cls

    def _construct(self, arguments: dict[str, Any]) -> None:
        """The constructor of an optimizer, given its ``locals()``.

        Raises TypeError for an unknown option, and ValueError.
        """
        arguments = {name: value for name, value in arguments.items() if name != "self"}
        params, options = arguments.pop("params"), arguments.pop("options")
        if unknown := [name for name in options if name not in RULES]:
            call = f"{type(self).__name__}.__init__()"
            raise TypeError(f"{call} got an unexpected keyword argument {unknown[0]!r}")
        check_options(options)
        for name, value in options.items():
            is_flag = isinstance(getattr(FusedOptimizer, name), bool)
            setattr(self, name, bool(value) if is_flag and value != "split" else value)
        self._takes_options = True
        check_hyper(self.algorithm, arguments)
        check_range(kernel_hyper(self.algorithm, arguments))
        if (fill := self.algorithm.filled_with) is not None:
            check(fill, arguments[fill], NUMBER)
        if self._replaces is None:
            torch.optim.Optimizer.__init__(self, params, arguments)
            return
        self._replaces.__init__(self, params, **arguments)
        # torch's Adagrad has filled its states now, in the parameter's type.
        for state in self.state.values():
            for name in self.algorithm.states:
                fresh = float(arguments[str(fill)])
                state[name] = torch.full_like(state[name], fresh, dtype=torch.float32)

    def check_options(self) -> None:
        """Raise ValueError for options and groups that were changed to what they cannot be."""
        now = values_of(self)
        if now != self._checked:
            options = dict(zip(RULES, now, strict=True))
            check_options(options)
            if self._rows.table is not None:
                for name, value in self._rows.made_with.items():
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
        check_hyper(self.algorithm, group)
        for name, value in kernel_hyper(self.algorithm, group).items():
            check(name, value, FINITE)
        check("schedule_step", group.get("schedule_step", 0), COUNT)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_group(group, self._whole_options())
        self._states.storage_of(group)
        check_hyper(self.algorithm, group)
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

    # --- the step -------------------------------------------------------------------------------

    @tells_schedulers
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
            RuntimeError: inside a scale_loss context; a sparse gradient; tensors on several devices
                or on meta; under amp, hundreds of steps in a row that were all skipped.
            TypeError: a float64 or complex gradient.
            ValueError: an option or hyper-parameter was changed to what it cannot be. Nothing has
                changed then.
        """
        self._opt_called = True
        self._ledger.check_before_step()
        self._check_not_swapped("step()")
        self.check_options()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        table, stateless = self._collect()
        for row in stateless:
            self._states.init_row(row)
        if stateless:
            self._states.remember()
        max_norm, self.clip_once = self.clip_once or self.max_grad_norm or 0.0, None
        meter = self._meter if self._rehearsal is None else None
        metered = meter.before_update(table) if meter is not None else None
        self._rows.plan.update(**self._verdict(max_norm), meter=metered)
        if meter is not None and metered is not None:
            meter.after_update(table, metered)
        if torch.is_autocast_enabled(self._rows.params[0].device.type):
            torch.clear_autocast_cache()  # it may hold casts of the weights as they were
        self._watch_skips()
        return loss

    def _collect(self) -> tuple[ParamTable, list[int]]:
        """The table, which has all that the step needs, and rows with a gradient but no state."""
        rows = self._rows
        rows.master_the_unfrozen()
        table = rows.table
        if table is not None and self._states.are_of(rows.params):
            found = rows.plan.collect(*self._gradient_scale(), self.param_groups, self.state)
            if found is not None:
                self._hypers.send(table)
                if self._states.are_bound:
                    return table, found
        # The first step; or parameters, states or what groups keep of them are others.
        table = self.keep_bound()
        self._hypers.send(table)
        found = rows.plan.collect(*self._gradient_scale())
        assert found is not None
        return table, found

    def _gradient_scale(self) -> tuple[Tensor | None, bool, bool]:
        """What gradients outside scale_loss carry; whether the update leaves them without it."""
        return self.__dict__.get("grad_scale"), self.unscale_grads, self._unscales_half

    def keep_bound(self) -> ParamTable:
        """The table, bound anew if somebody loaded, cleared or exchanged parameters or states."""
        table = self.param_table()
        if not (self._states.are_of(self._rows.params) and table.holds(states=self.state)):
            self._states.bind()
        return table

    def _table_is_new(self) -> None:
        self._states.unpin()
        self._checked = None

    def _rows_are_added(self) -> None:
        self._hypers.forget()

    @uncompiled
    @torch.no_grad()
    def clip_next_step(self, max_norm: float) -> Tensor:
        check("max_norm", max_norm, ABOVE_0)
        table = self.param_table()
        table.plan.collect(*self._gradient_scale())
        table.plan.measure()
        self.clip_once = float(max_norm)
        return table.inspector.state_field("sum_squares").sqrt().to(torch.float32)

    @contextlib.contextmanager
    def swap_ema(self) -> Iterator[None]:
        """In the block the model has the averages of its weights, rounded to their type.

        Afterwards it has the weights again, with the same bits; masters never change. It takes a
        copy of the weights for the time of the block.

        Raises:
            RuntimeError: without ``ema_decay``, or within another such block. In the block a step
                raises one too, and so does what saves, loads, copies or looks at masters.
        """
        if self.ema_decay is None or self._swapped:
            what = "a swap_ema block is open already" if self._swapped else "there are no averages"
            raise RuntimeError(f"{what}; build the optimizer with ema_decay= and nest no blocks")
        table = self.keep_bound()
        table.masters.refresh()  # so that afterwards all there is counts as known
        with self._states.averages_in_place(table):
            yield

    # --- schedules ------------------------------------------------------------------------------

    def follow(self, scheduler: LRScheduler | None, steps: int = 0) -> None:
        """Tabulate `scheduler` and take each coming step's lr, weight decay, momentum, betas there.

        The table lives on the device and is indexed by the steps that were applied, so that a
        step skipped after an overflow does not use up a rate, and a per-step schedule needs neither
        ``scheduler.step()`` nor any other work of the host, inside a captured graph too. Rates are
        doubles, as the scheduler computes them. After the table's end the last row stays.

        The scheduler is run on a copy of the groups and stays as it is; do not call its ``step``
        any more. ``state_dict`` saves the position (``schedule_step`` in the groups); who resumes
        makes scheduler and optimizer as at the start, and calls ``follow`` before or after
        ``load_state_dict``.

        Arguments:
            scheduler: of ``torch.optim.lr_scheduler`` and of this optimizer; compositions too.
                None: follow no longer. The groups then hold the values of the next step (waits).
            steps: the number of steps to tabulate; one ``scheduler.step()`` each.

        Raises:
            TypeError: a scheduler that needs a metric, or that is not torch's.
            ValueError: it belongs to another optimizer, ends earlier, or changes another option.
        """
        table = self.param_table()
        if scheduler is None:
            schedule, self._schedule = self._schedule, None
            if schedule is not None:
                schedule.write_to(self.param_groups, table.inspector.state_field("schedule_step"))
            return

        hyper = functools.partial(kernel_hyper, self.algorithm)
        self._schedule = tabulate(self, scheduler, int(steps), hyper, table.param(0).device)
        self._rows.start_schedule_at(0)
        self._take_schedule_step()

    def learning_rates(self) -> Tensor:
        """Each group's rate in the next applied step: float64, shape (groups,), on the device."""
        step = self.param_table().inspector.state_field("schedule_step")
        rates = []
        for i, group in enumerate(self.param_groups):
            scheduled = self._schedule.at(i, step) if self._schedule is not None else {}
            rate = torch.as_tensor(scheduled.get("lr", group["lr"]), dtype=torch.float64)
            rates.append(rate.to(step.device).reshape(()))
        return torch.stack(rates)

    # --- state dicts and copies -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self._states.drop_unstarted()
        state_dict = super().state_dict()
        if self._schedule is not None:
            position = self._rows.applied_steps()
            for group in state_dict["param_groups"]:
                group["schedule_step"] = position
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = False) -> None:
        super().load_state_dict(state_dict, strict=strict)
        if self._schedule is not None:
            self._take_schedule_step()

    def _take_schedule_step(self) -> None:
        """Go on where a state dict that was loaded, before or after `follow`, says."""
        positions = [group.pop("schedule_step", None) for group in self.param_groups]
        if positions[0] is not None:
            self._rows.start_schedule_at(int(positions[0]))

    def __setstate__(self, state: dict[str, Any]) -> None:
        position = state.pop("_applied_steps", 0)
        super().__setstate__(state)
        self._states.are_bound = False
        if position:
            self._rows.next_schedule_step = position

    def __getstate__(self) -> dict[str, Any]:
        self._states.drop_unstarted()
        state = super().__getstate__()
        if self._schedule is None:
            return state
        position = self._rows.applied_steps()
        return {**state, "_schedule": self._schedule, "_applied_steps": position}


def is_fused(optimizer: torch.optim.Optimizer) -> TypeGuard[FusedOptimizer]:
    """Whether the optimizer's step is ours, or a subclass's that calls ours."""
    return isinstance(optimizer, FusedOptimizer) and not optimizer._has_own_step


def algorithm_of(optimizer: torch.optim.Optimizer) -> Algorithm | None:
    """The kernel that steps `optimizer`, or would after an upgrade; None if it steps itself."""
    cls = type(optimizer)
    fused = cls if issubclass(cls, FusedOptimizer) else FUSED.get(cls)
    return ALGORITHMS[fused._algorithm] if fused else None


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
