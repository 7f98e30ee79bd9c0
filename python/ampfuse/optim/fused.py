"""The fused step: unscale, overflow check, clip, update and cast back, in two passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Set
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard

import torch
from torch import Tensor

from ampfuse._schema import ALGORITHMS, Algorithm
from ampfuse.optim.base import AmpOptimizer, tells_schedulers
from ampfuse.optim.options import (
    ABOVE_0,
    BOOL_OPTIONS,
    FIXED,
    NUMBER,
    RULES,
    changed_too_late,
    check,
    check_options,
)
from ampfuse.optim.param_groups import Hypers, check_hyper, is_empty
from ampfuse.optim.sharding import local
from ampfuse.optim.state import StateOfParameters, States
from ampfuse.torch_utils import FLOAT_DTYPES, dynamo_disable

if TYPE_CHECKING:
    from ampfuse._C import ParamTable

# By torch's class, the one that ``upgrade`` turns it into.
FUSED: dict[type[torch.optim.Optimizer], type[FusedOptimizer]] = {}


class FusedOptimizer(AmpOptimizer):
    """Base of the optimizers whose update is one of ampfuse's kernels.

    The class argument `algorithm` names the kernel, whose schema gives states and hyper-parameters.
    With `replaces` the class stands in for that class of torch, from which it also inherits, when
    amp upgrades an optimizer.

    amp and GradScalers treat a subclass that overrides `step` as a third-party optimizer: they
    unscale its gradients first. Once its step has called this one, or with the class argument
    ``own_step=False``, they treat it as fused.
    """

    # The kernel of each class, by its name.
    kinds: ClassVar[dict[str, str]] = {}
    _replaces: type[torch.optim.Optimizer] | None = None
    # Whether a step also unscales half gradients, with rounding.
    _unscales_half = False
    # The step count of a parameter without a state.
    _first_step = 0
    skip_by_default = True
    # Options that a group cannot have, and keys that others put into the groups.
    _not_in_groups = frozenset(RULES.keys() - {"state_dtype"})
    _third_party_keys: Set[str] = frozenset()
    # The next step clips to this L2 norm instead of `max_grad_norm`.
    clip_once: float | None = None
    # For each group, the numbers that the steps of a captured graph read on the device.
    _on_device: list[dict[str, Tensor]] | None = None

    _states = cached_property(States)
    _hypers = cached_property(Hypers)

    def __init_subclass__(
        cls,
        *,
        algorithm: str | None = None,
        replaces: type[torch.optim.Optimizer] | None = None,
        own_step: bool | None = None,
        **kwargs: Any,
    ) -> None:
        definer = next(kind for kind in cls.__mro__ if "step" in vars(kind))
        if own_step is None:  # a step in the body, or of a class that is not ours
            own_step = (
                cls._has_own_step or definer is cls or not issubclass(definer, FusedOptimizer)
            )
        if own_step != cls._has_own_step:
            cls._has_own_step = own_step
            cls._step_supports_amp_scaling = not own_step
        super().__init_subclass__(**kwargs)
        if algorithm is not None:
            cls._algorithm, cls._replaces = algorithm, replaces
            cls.kinds[cls.__name__] = algorithm
        if replaces is not None:
            FUSED[replaces] = cls

    def _construct(self, arguments: dict[str, Any], *, by_torchs: bool = True) -> None:
        """The constructor of an optimizer, given its ``locals()``.

        `by_torchs`: call that of the class of torch that this one replaces.

        Raises TypeError for an unknown option, and ValueError for a wrong value.
        """
        arguments = {name: value for name, value in arguments.items() if name != "self"}
        params, options = arguments.pop("params"), arguments.pop("options")
        if unknown := [name for name in options if name not in RULES]:
            call = f"{type(self).__name__}.__init__()"
            raise TypeError(f"{call} got an unexpected keyword argument {unknown[0]!r}")
        check_options(options)
        for name, value in options.items():
            setattr(self, name, bool(value) if name in BOOL_OPTIONS and value in (0, 1) else value)
        check_hyper(self.algorithm, arguments)
        if (fill := self.algorithm.filled_with) is not None:
            check(fill, arguments[fill], NUMBER)
        if self._replaces is not None and by_torchs:
            self._replaces.__init__(self, params, **arguments)
        else:
            torch.optim.Optimizer.__init__(self, params, arguments)
        # torch's Adagrad has filled its states by now, in the parameter's type.
        for state in self.state.values():
            for name in self.algorithm.states:
                fresh = float(arguments[str(fill)])
                state[name] = torch.full_like(state[name], fresh, dtype=torch.float32)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; ValueError for an option's wrong value, or one that comes too late."""
        if name == "state":  # torch assigns it, and users may
            if not isinstance(value, StateOfParameters):
                value = StateOfParameters(dict, value)
            value.states = self._states
        if name in RULES:
            check_options({each: getattr(self, each) for each in FIXED} | {name: value})
            old = getattr(self, name)
            if name in FIXED and value != old and self._rows.table is not None:
                raise ValueError(changed_too_late(name, old, value))
        super().__setattr__(name, value)

    def _check_group(self, group: dict[str, Any]) -> None:
        self._has_options(group)
        self._states.storage_of(group)
        check_hyper(self.algorithm_in(group), group)
        if group.get("differentiable"):
            raise ValueError(
                "differentiable=True is not supported: autograd does not record a fused update. "
                f"Use torch.optim.{type(self).__name__}."
            )
        for param in group["params"]:
            if param.dtype not in FLOAT_DTYPES:
                raise TypeError(
                    f"ampfuse.optim.{type(self).__name__} supports float32, float16 and bfloat16 "
                    f"parameters, got {param.dtype} of shape {tuple(param.shape)}. Convert the "
                    "model, or use torch.optim for it."
                )

    def _has_options(self, group: dict[str, Any]) -> bool:
        """Whether a group has options of the whole optimizer, which have no effect there.

        Raises ValueError if one differs from the optimizer's. (Wrappers such as
        ZeroRedundancyOptimizer repeat the optimizer's arguments in its groups.) Groups of torch's
        optimizers, and those of a checkpoint, may have such keys with another meaning.
        """
        options = self._not_in_groups & group.keys() - self._third_party_keys
        for name in sorted(options):
            if group[name] != getattr(self, name):
                raise ValueError(
                    f"{name}={group[name]!r} is set in a parameter group, but it is an option of "
                    f"the whole optimizer: pass it to the constructor, {type(self).__name__}("
                    f"params, {name}=...), or set optimizer.{name}, and take it out of the group."
                )
        return bool(options)

    def note_third_party_keys(self) -> None:
        """The keys that are in the groups now were not meant for ampfuse."""
        self._third_party_keys = {key for group in self.param_groups for key in group}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    # --- the step -------------------------------------------------------------------------------

    @tells_schedulers
    @dynamo_disable
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step; see :class:`Options` for masters, clipping and overflow.

        Arguments:
            closure: reevaluates the model under ``torch.enable_grad`` and returns the loss.

        Returns:
            What the closure returned, else None. Whether the step was applied is in
            ``last_step.skipped``, on the device.

        Raises:
            RuntimeError: inside a scale_loss context; a sparse gradient; tensors on several devices
                or on meta; ``max_skipped_steps`` skipped steps in a row.
            TypeError: a float64 or complex gradient.
            ValueError: a hyper-parameter was set to a wrong value. The step has changed nothing.
        """
        self._opt_called = True
        self._check_before_step()
        self._check_not_swapped("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._has_own_step:
            self._become_fused()
        if (collected := self._collect()) is None:
            return loss
        table, stateless = collected
        if stateless:
            self._states.init_rows(stateless)
        max_norm = self.clip_once or self.max_grad_norm or 0.0
        meter = self._meter if self._rehearsal is None else None
        metered = meter.before_update(table) if meter is not None else None
        skipped = self._rows.plan.update(
            **self._skip_decision(max_norm), meter=metered, between=self._between_stages()
        )
        self.clip_once = None
        if meter is not None and metered is not None:
            meter.after_update(table, metered)
        if torch.is_autocast_enabled(self._rows.params[0].device.type):
            torch.clear_autocast_cache()  # it may hold casts of the weights as they were
        self._watch_skips(skipped)
        return loss

    def _become_fused(self) -> None:
        """The step of a subclass has called this one: from now on the optimizer is fused."""
        kind: Any = getattr(self, "_original_class", type(self))
        kind._has_own_step, kind._step_supports_amp_scaling = False, True
        if type(self) is not kind:  # amp has wrapped it
            self._rows.drop_table()
            self.__class__ = kind

    def _between_stages(self) -> Callable[[list[int]], Callable[[], None]] | None:
        """The function that `StepPlan.update` calls between the two stages of a step, or None.

        Called before the first stage, which needs the scratch memory of such algorithms' rows.
        """
        return None

    def _collect(self) -> tuple[ParamTable, list[int]] | None:
        """The table, ready for a step, and the rows with a gradient but no state.

        None if the groups are empty.
        """
        rows = self._rows
        rows.make_masters()
        table = rows.table
        if table is not None and self._states.are_bound:
            stateless = rows.plan.collect(*self._gradient_scale(), self.param_groups, self.state)
            if stateless is not None:
                self._hypers.send(table)
                if self._states.are_bound:
                    return table, stateless
        # This is the first step, or parameters, states or storage types have changed.
        if is_empty(self):
            return None
        table = self.ensure_bound()
        self._hypers.send(table)
        stateless = rows.plan.collect(*self._gradient_scale())
        assert stateless is not None
        return table, stateless

    def _gradient_scale(self) -> tuple[Tensor | None, bool, bool]:
        """The scale of gradients outside scale_loss; whether the update unscales `.grad` itself."""
        return self.__dict__.get("grad_scale"), self.unscale_grads, self._unscales_half

    def ensure_bound(self) -> ParamTable:
        """The table, bound again if parameters or states were loaded, cleared or exchanged."""
        table = self.param_table()
        if not (self._states.are_bound and table.matches(states=self.state)):
            self._states.bind()
        return table

    def _rows_are_added(self) -> None:
        self._states.forget()
        self._hypers.forget()

    @dynamo_disable
    @torch.no_grad()
    def clip_next_step(self, max_norm: float) -> Tensor:
        check("max_norm", max_norm, ABOVE_0)
        table = self.param_table()
        table.plan.collect(*self._gradient_scale())
        table.plan.measure()
        self.clip_once = float(max_norm)
        return table.inspector.state_field("sum_squares").sqrt().to(torch.float32)

    @contextlib.contextmanager
    @torch.no_grad()
    def swap_ema(self) -> Iterator[None]:
        """In the block the model has the averages of its weights, rounded to their type.

        Afterwards it has the weights again, with the same bits; masters never change. The block
        holds a copy of the weights.

        Raises:
            RuntimeError: without ``ema_decay``, or within another such block. In the block, steps
                and saving, loading, copying or reading masters raise it too.
        """
        if self.ema_decay is None or self._swapped:
            what = "a swap_ema block is open already" if self._swapped else "there are no averages"
            raise RuntimeError(
                f"{what}. Create the optimizer with ema_decay=..., and do not nest swap_ema blocks."
            )
        table = self.ensure_bound()
        table.masters.refresh()  # afterwards every edit counts as known
        weights = []
        self._swapped = True
        try:
            for row, param in enumerate(self._rows.params):
                if (average := self.state.get(param, {}).get("ema")) is not None:
                    model = table.model(row)
                    weight = table.param(row) if model is None else model
                    weights.append((weight, weight.detach().clone()))
                    weight.copy_(local(average))
            yield
        finally:
            self._swapped = False
            for weight, before in weights:
                weight.copy_(before)
            table.masters.accept_model_weights()

    # --- state dicts and copies -----------------------------------------------------------------

    def release_states(self) -> None:
        self._states.release()
        super().release_states()

    def _before_saving(self) -> None:
        self._states.discard_uninitialized()
        super()._before_saving()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.state = self.state
        self._states.are_bound = False
        self.note_third_party_keys()


def is_fused(optimizer: torch.optim.Optimizer) -> TypeGuard[FusedOptimizer]:
    """Whether the optimizer's step is the fused one, or a subclass's that calls it."""
    return isinstance(optimizer, FusedOptimizer) and not optimizer._has_own_step


def algorithm_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any] | None = None
) -> Algorithm | None:
    """The kernel that steps `optimizer`, or would after an upgrade; None if there is none.

    With `group`, the kernel for its parameters.
    """
    if is_fused(optimizer):
        return optimizer.algorithm if group is None else optimizer.algorithm_in(group)
    fused = FUSED.get(type(optimizer))
    return ALGORITHMS[fused._algorithm] if fused else None
