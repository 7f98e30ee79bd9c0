"""The base of all optimizers under amp: skip decisions and state dicts.

`AmpOptimizer` goes in front of a ``torch.optim.Optimizer``. Fused optimizers replace its step
(fused.py); any other optimizer keeps its own (upgrade.py).
"""

from __future__ import annotations

import contextlib
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor
from torch.optim import Optimizer

from ampfuse._schema import ALGORITHMS, Algorithm
from ampfuse.optim import checkpoints
from ampfuse.optim.gradients import ScaledGradients
from ampfuse.optim.last_step import REASONS, LastStep, SkipWatch, skipped_steps
from ampfuse.optim.masters import MASTERS, has_begun, without_gradient
from ampfuse.optim.options import RULES
from ampfuse.optim.param_groups import parameters, with_wrapped
from ampfuse.torch_utils import Function

if TYPE_CHECKING:
    from ampfuse.insight.meter import Meter
    from ampfuse.optim.larc import Layerwise


class AmpOptimizer(ScaledGradients):
    """An optimizer that amp can scale, inspect and skip, in front of a class of torch's or others'.

    The rest of ampfuse uses its public methods. The private attributes have names that a
    third-party class is unlikely to use.
    """

    # torch.amp.GradScaler then hands over `grad_scale` and `found_inf` instead of unscaling.
    _step_supports_amp_scaling = True
    _algorithm = "none"

    # Under amp: an overflow always skips the step, as it changes the loss scale.
    skip_on_overflow: bool = True
    # Whether a non-finite gradient skips the step where `skip_nonfinite` is None.
    skip_by_default: bool = False
    # Whether the last step could be skipped. If False, callers need not synchronize to find out.
    may_have_skipped: bool = False

    # A subclass of a fused optimizer overrides `step`, and keeps its own state.
    _has_own_step = False
    # A 1 on the device while steps are rehearsed: each is skipped, whatever its gradients are.
    _rehearsal: Tensor | None = None
    # LARC sets it during its step.
    _layerwise: Layerwise | None = None
    # torch.distributed.checkpoint (DCP) asked for states, and takes the state dict next.
    _dcp_is_reading = False
    # The state dict that is being loaded.
    _loading: dict[str, Any] | None = None

    # Keys of a parameter group that loading a state dict does not change.
    _group_choices: tuple[str, ...] = ("state_dtype",)
    # Attributes that a copy has too.
    _copied: tuple[str, ...] = (
        *RULES,
        "skip_on_overflow",
        "skip_by_default",
        "_under_amp",
        "_amp_session",  # amp's policy and loss scalers: a copy trains on under amp
    )

    _skip_watch = cached_property(lambda self: SkipWatch(self._step_history))  # a copy has one
    _meter: Meter | None = None
    _opt_called = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A wrapper that takes on its optimizer's class (Lightning, Fabric) delegates all to it.

        Otherwise it would inherit our methods, and they would work on a table of its own.
        """
        super().__init_subclass__(**kwargs)
        wrapper = cls.__bases__[0]
        if hasattr(wrapper, "__getattr__") and not issubclass(wrapper, Optimizer):
            for name in set(dir(cls)) - set(dir(wrapper)):
                setattr(cls, name, _of_wrapped(name))

    @property
    def algorithm(self) -> Algorithm:
        """The extension's description of its kernel."""
        return ALGORITHMS[self._algorithm]

    def algorithm_in(self, group: dict[str, Any]) -> Algorithm:
        """The extension's description of the kernel for the parameters of a group."""
        return self.algorithm

    @property
    def last_step(self) -> LastStep:
        """The decisions of the last step; see :class:`LastStep`."""
        return LastStep(self.param_table())

    @property
    def skipped_steps(self) -> dict[str, Tensor]:
        """The number of skipped steps by reason: ``"nonfinite"`` and ``"spike"``.

        float64 and 0-dim, copied on the parameters' device; only reading a value waits. A training
        that is resumed from ``state_dict()`` continues the counts.
        """
        return skipped_steps(self.param_table())

    @property
    def meter(self) -> Meter:
        """Statistics of what half precision does to each tensor; see :class:`Meter`.

        Counting begins when the meter is called.
        """
        if self._meter is None:
            import ampfuse  # which imports the layer above at first use

            self._meter = ampfuse.insight.Meter(self)
        return self._meter

    def clip_next_step(self, max_norm: float) -> Tensor:
        """Clip the gradients of the next step to the L2 norm `max_norm`.

        Returns:
            The norm of all unscaled gradients before clipping: float32, 0-dim, on the device.
        """
        raise NotImplementedError

    # --- the decisions of a step ----------------------------------------------------------------

    def _skip_decision(self, max_norm: float) -> dict[str, Any]:
        """Arguments for ``StepPlan.update`` and ``decide``: what to inspect, whether to skip."""
        found_inf = self.__dict__.get("found_inf")
        if "found_inf" in self.__dict__:  # a GradScaler calls this step
            # torch's GradScaler passes the number 0 if there were no gradients.
            found_inf = found_inf if isinstance(found_inf, Tensor) else None
            inspect, skip = found_inf is None, True
        else:
            asked = self.skip_by_default if self.skip_nonfinite is None else self.skip_nonfinite
            inspect = asked or self._scales_dynamically
            skip = inspect or max_norm > 0 or self.skip_spikes is not None
        self.may_have_skipped = skip
        if self._rehearsal is not None:
            found_inf, skip = self._rehearsal, True
        return {
            "found_inf": found_inf,
            "max_norm": max_norm,
            "inspect": inspect,
            "skip_nonfinite": skip,
            "skip_spikes": (self._rehearsal is None and self.skip_spikes) or 0.0,
        }

    @property
    def _scales_dynamically(self) -> bool:
        return self._under_amp and self.skip_on_overflow

    def _watch_skips(self, skipped: bool = False) -> None:
        """After a step: log whether it was skipped, and raise if training has stopped.

        `skipped`: the host already knows that it was skipped.
        """
        by_scaler = "found_inf" in self.__dict__
        is_watched = self.may_have_skipped and (self.skip_spikes is not None or not by_scaler)
        if is_watched and self._rehearsal is None:
            expects_overflows = by_scaler or self._scales_dynamically
            logs = ("spike",) if expects_overflows else REASONS
            self._skip_watch.after_step(self, self._rows.existing_table(), skipped, logs)

    # --- state dicts and copies: see checkpoints.py ---------------------------------------------

    def _before_saving(self) -> None:
        self.sync_masters_from_model()

    def state_dict(self) -> dict[str, Any]:
        """The state dict of torch's optimizer, with masters and ``step_history``.

        ``step_history`` (float64) holds the numbers of skipped steps and the statistics of
        `skip_spikes`.

        The tensors are the optimizer's own: the dict takes no memory, and the next step changes
        them. A whole master is ``master_param`` (float32). A split one is ``master_remainder``
        (int16): 16 more bits of the weight, which is in the model's state dict. A BF16 state is
        under its name, an 8-bit state under ``<name>_8bit`` (the suffix is its type's) and
        ``<name>_scale``.
        Every mode loads the state dicts of every other; see `load_state_dict`.

        Shards have masters and 8-bit states in float32. So has torch.distributed.checkpoint, and
        every state from the beginning: with zeros and counts of 0 before the first gradient. It
        gets ``step_history`` with `skip_spikes` only: it loads no checkpoint that lacks a key.
        """
        try:
            self._before_saving()
            state_dict = super().state_dict()
            return checkpoints.with_masters(self, state_dict, decoded=self._dcp_is_reading)
        finally:
            self._end_dcp_read()

    def torch_state_dict(self) -> dict[str, Any]:
        """`state_dict` in float32, masters included, as torch's optimizer of the name loads it."""
        return checkpoints.in_float32(self, self.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, like torch's, but without rounding FP32 state to half precision.

        Accepts state dicts of the torch optimizer of the same name and, with or without masters,
        of ampfuse with any storage type; states are converted to this optimizer's. Masters that are
        not in the state dict are taken from the model weights. Load the model first if the state
        dict has split masters and this optimizer has whole ones, or the other way round.

        Tensors are copied one at a time, after the present states have gone: on the device, loading
        takes no more than the states themselves.

        Raises:
            ValueError: the number or shapes of the parameters differ, or the state is damaged, such
                as one without ``exp_avg`` or with a step count of NaN.
            RuntimeError: in a swap_ema block. Nothing has changed then.
        """
        self._end_dcp_read()
        self._check_not_swapped("load_state_dict()")
        load = checkpoints.load_around if len(with_wrapped(self)) > 1 else checkpoints.load
        load(self, state_dict, super().load_state_dict)

    def _begin_dcp_read(self) -> None:
        """torch.distributed.checkpoint is about to read the groups, their keys and state dict."""
        self._dcp_is_reading = True
        if self.skip_spikes is not None:
            self.param_groups[0][checkpoints.HISTORY] = self._rows.history()

    def _end_dcp_read(self) -> None:
        self._dcp_is_reading = False
        if getattr(self, "param_groups", None):
            self.param_groups[0].pop(checkpoints.HISTORY, None)

    def release_states(self) -> None:
        """Let go of all states but masters, before others are loaded in their place."""
        for param in parameters(self):
            if held := self.state.get(param):
                self.state[param] = {key: held[key] for key in MASTERS & held.keys()}

    def load_history(self, saved: Tensor | None) -> None:
        """Continue after the steps of a saved history; None: after none."""
        self._rows.load_history(saved)
        self._skip_watch = SkipWatch(saved)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called by load_state_dict, pickle and deepcopy alike.
        if self._loading is not None:
            checkpoints.restore_state(self, state, self._loading)
        # torch's looks for a step count in each state. Before the first step a state holds only its
        # master, and a custom step may keep none.
        states = state.get("state", {})
        alone = [
            param for param, held in states.items() if self._has_own_step or not has_begun(held)
        ]
        set_aside = {param: states.pop(param) for param in alone}
        super().__setstate__(state)
        states.update(set_aside)

    def __getstate__(self) -> dict[str, Any]:
        self._before_saving()
        own = {key: self.__dict__[key] for key in self._copied if key in self.__dict__}
        if (history := self._rows.history()) is not None:
            own["_step_history"] = history.clone()
        if self.master_weights == "split":
            states = {param: without_gradient(state) for param, state in self.state.items()}
            own["state"] = defaultdict(dict, states)
        return {**super().__getstate__(), **own}


def count_skipped_steps(optimizers: Iterable[Any]) -> dict[str, int]:
    """Skipped steps of all optimizers under amp by reason, for a framework's logs. Waits."""
    counts = [one.skipped_steps for each in optimizers for one in amp_optimizers(each)[-1:]]
    return {
        f"skipped_steps/{reason}": int(sum(each[reason] for each in counts)) for reason in REASONS
    }


def _of_wrapped(name: str) -> property:
    """An attribute that a wrapper delegates to its ``_optimizer``."""
    return property(
        operator.attrgetter(f"_optimizer.{name}"),
        lambda wrapper, value: setattr(wrapper._optimizer, name, value),
    )


def amp_optimizers(optimizer: Any) -> list[AmpOptimizer]:
    """The optimizers under amp among `optimizer` and those that it wraps, the innermost last."""
    return [one for one in with_wrapped(optimizer) if isinstance(one, AmpOptimizer)]


def tells_schedulers(step: Function) -> Function:
    """Decorator of a step that sets ``_opt_called``: torch's schedulers need not wrap it then."""
    marked: Any = step
    marked._wrapped_by_lr_sched = True
    return step


def handles_loss_scaling(optimizer: Any) -> TypeGuard[AmpOptimizer]:
    """Whether its step unscales, inspects and skips without a GradScaler's help."""
    return isinstance(optimizer, AmpOptimizer) and optimizer._step_supports_amp_scaling


@contextlib.contextmanager
def under_grad_scaler(optimizer: AmpOptimizer, **by: Tensor | bool | None) -> Iterator[None]:
    """In the block `optimizer` has a GradScaler's ``grad_scale`` and ``found_inf``, as in torch."""
    for name, value in by.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:  # the next step may be made without a scaler
        for name in by:
            delattr(optimizer, name)
