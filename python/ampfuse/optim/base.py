"""What every optimizer under amp shares: rows of a table, and a ledger of gradients.

`AmpOptimizer` goes in front of a ``torch.optim.Optimizer``. The fused optimizers add a step of
their own (fused.py), any other optimizer keeps its own (generic.py).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampfuse import plugs
from ampfuse._schema import ALGORITHMS, Algorithm
from ampfuse.optim import checkpoints
from ampfuse.optim.inner import with_inner
from ampfuse.optim.ledger import Ledger
from ampfuse.optim.masters import has_begun
from ampfuse.optim.options import RULES, WithOptions
from ampfuse.optim.parts import member
from ampfuse.optim.rows import Rows
from ampfuse.optim.skip_watch import SkipWatch
from ampfuse.uncompiled import Function, uncompiled

if TYPE_CHECKING:
    from ampfuse._C import ParamTable
    from ampfuse.insight.meter import Meter
    from ampfuse.optim.larc import Layerwise


def _copy_of(field: str) -> Callable[[Any], Tensor]:
    return lambda last_step: last_step._table.inspector.state_field(field).clone()


class LastStep:
    """What an optimizer's last step decided, as device tensors; reading one is what waits.

    Each is a 0-dim tensor on the parameters' device, copied at the time of asking.

    Attributes:
        skipped: float32, 1 if the step was skipped because a gradient held inf or NaN, else 0.
        grad_norm: float32, the L2 norm of the unscaled gradients before clipping; NaN if they were
            not finite. None if the step did not look: without scaling, clipping and skipping, or
            where a GradScaler has, or after several passes of `scale_loss`.
        loss_scale: float32, the scale the gradients were made with.
    """

    def __init__(self, table: ParamTable) -> None:
        self._table = table

    skipped = property(_copy_of("skip"))
    grad_norm = property(
        lambda self: _copy_of("grad_norm")(self) if self._table.plan.knew_norm else None
    )
    loss_scale = property(_copy_of("loss_scale"))

    def overflow(self) -> dict[str, Any] | None:
        """Where the latest overflow was, or None if there was none. Waits for the device.

        Returns:
            ``parameter`` (name of the first parameter whose gradient was not finite), ``kind``
            (``"inf"`` or ``"nan"``) and ``skipped_steps`` (how many steps were skipped so far).
        """
        row = int(self._table.inspector.state_field("last_bad_row"))
        if row < 0:
            return None
        bits = int(self._table.inspector.state_field("last_bad_bits"))
        return {
            "parameter": self._table.name(row),
            "kind": "nan" if bits > 0x7F800000 else "inf",
            "skipped_steps": int(self._table.inspector.state_field("skipped_steps")),
        }


class AmpOptimizer(WithOptions, Optimizer):
    """An optimizer that amp can scale, inspect and skip, in front of a class of torch's or others'.

    Its public methods are what the rest of ampfuse works with. Other attributes have names that no
    optimizer is likely to have, as this goes in front of classes of other people too.
    """

    # torch.amp.GradScaler then hands over `grad_scale` and `found_inf` instead of unscaling.
    _step_supports_amp_scaling = True
    _algorithm = "none"

    # Under amp: whether an overflow always skips the step, as it changes the loss scale.
    skip_on_overflow: bool = True
    # Whether one does where `skip_nonfinite` is None.
    skip_by_default: bool = False

    _under_amp: bool = False
    # In a subclass of a fused optimizer whose step, and state, is not ours.
    _has_own_step = False
    # A 1 on the device while steps are rehearsed: each is skipped, whatever its gradients are.
    _rehearsal: Tensor | None = None
    # While ampfuse.GradScaler drives a step; torch's does not know of masters.
    _scaler_is_ours = False
    # Set by LARC for the time of a step of its own.
    _layerwise: Layerwise | None = None
    # Within a swap_ema block.
    _swapped = False
    # torch.distributed.checkpoint asked for states, and takes the state dict next.
    _is_asked_by_torch = False
    # The state dict that is being loaded.
    _loading: dict[str, Any] | None = None

    # What a parameter group keeps where another's state is loaded, as how states are stored.
    _group_choices: tuple[str, ...] = ("state_dtype",)
    # Attributes that a copy has too.
    _copied: tuple[str, ...] = (
        *RULES,
        "skip_on_overflow",
        "skip_by_default",
        "_under_amp",
        "_amp_session",  # amp's policy and loss scalers: a copy trains on under amp
    )

    _rows = cached_property(Rows)
    _ledger = cached_property(Ledger)
    _skip_watch = cached_property(lambda _: SkipWatch())
    _meter: Meter | None = None
    _opt_called = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A wrapper that gives itself its optimizer's class (Lightning, Fabric) hands all on.

        Else it would inherit our methods, and they would work on a table of its own.
        """
        super().__init_subclass__(**kwargs)
        wrapper = cls.__bases__[0]
        if hasattr(wrapper, "__getattr__") and not issubclass(wrapper, Optimizer):
            for name in set(dir(cls)) - set(dir(wrapper)):
                setattr(cls, name, property(operator.attrgetter(f"_optimizer.{name}")))

    @property
    def algorithm(self) -> Algorithm:
        """What the extension says of its kernel."""
        return ALGORITHMS[self._algorithm]

    def algorithm_in(self, group: dict[str, Any]) -> Algorithm:
        """... of the parameters of a group."""
        return self.algorithm

    @property
    def last_step(self) -> LastStep:
        """What the last step decided; see :class:`LastStep`."""
        return LastStep(self.param_table())

    @property
    def meter(self) -> Meter:
        """Counts what half precision does to each tensor, once it is called; see :class:`Meter`."""
        if self._meter is None:
            self._meter = plugs.at("optimizer.meter")(self)
        return self._meter

    def clip_next_step(self, max_norm: float) -> Tensor:
        """Clip the gradients of the next step to the L2 norm `max_norm`.

        Returns:
            The norm of all unscaled gradients before clipping: float32, 0-dim, on the device.
        """
        raise NotImplementedError

    # --- rows: see Rows -------------------------------------------------------------------------

    param_table = member("_rows.current", "The table, with a row for each parameter of groups.")
    parameter_names = member("_rows.parameter_names", "What messages call the parameters.")
    restore_master = member("_rows.restore_master", "See :meth:`Rows.restore_master`.")
    _table = member("_rows.table")

    def _rows_are_added(self) -> None:
        """The table knows neither states nor hyper-parameters of some rows."""

    def go_under_amp(
        self, *, master_weights: bool | Literal["split"], names: dict[int, str]
    ) -> None:
        """What :func:`ampfuse.optim.upgrade` does once the class is right."""
        self._rows.forget()
        self._under_amp, self.skip_by_default = True, False
        self.master_weights = master_weights
        self._rows.go_under_amp(names)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; under amp half-precision parameters of the group get FP32 masters."""
        super().add_param_group(param_group)
        self._rows.make_masters(anew=True)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take over every edit of the model's half weights, those made through ``.data`` too.

        Edits that autograd can see (``load_state_dict``, ``clamp_`` under ``no_grad``, assigning
        ``.data``) are followed by themselves at the next step; an in-place change of ``p.data``
        leaves no trace, and needs this call before the step. Other elements keep their bits.
        """
        self.param_table().masters.refresh(all=True)

    @torch.no_grad()
    def follow_edits(self) -> None:
        """Before masters are saved or copied: what was edited in the model since is in them.

        Raises RuntimeError in a swap_ema block: averages are no edits.
        """
        self._check_not_swapped("what looks at masters or saves them")
        if self._rows.are_used():
            self.param_table().masters.refresh()

    def _check_not_swapped(self, what: str) -> None:
        if self._swapped:
            raise RuntimeError(
                f"{what} inside a swap_ema block, where the model has its averages; do that after "
                "the block"
            )

    # --- gradients: see Ledger ------------------------------------------------------------------

    begin_backward = member("_ledger.begin")
    end_backward = member("_ledger.end")
    check_gradients = member("_ledger.check")
    cancel_backward = member("_ledger.cancel")
    look_at_gradient = member("_ledger.look")
    assign_gradient = member("_ledger.assign")
    unscale_gradients = member("_ledger.unscale")
    has_scaled_gradients = member("_ledger.is_delayed")
    in_backward = member("_ledger.in_backward")
    has_shards = member("_rows.has_shards")
    rows_of = member("_ledger.rows_of")

    @property
    def found_inf_flag(self) -> Tensor:
        """float32, 0-dim, on the device: 1 if a gradient since the last step was not finite."""
        return self.param_table().inspector.state_field("found_inf")

    @property
    def pass_found_inf_flag(self) -> Tensor:
        """float32, 0-dim, on the device: 1 if a gradient of the last backward pass was not finite.

        Passes with ``delay_unscale`` before it belong to it: nobody looked at their gradients then.
        """
        return self.param_table().inspector.state_field("pass_found_inf")

    @uncompiled
    @torch.no_grad()
    def inspect_gradients(self) -> Tensor:
        """Look at the gradients now, as the step would, which need not look again.

        Returns:
            `found_inf_flag`. In a backward pass, what was known before it.
        """
        table = self._rows.current()
        if not self.in_backward:
            table.plan.collect(None, False)
            table.plan.measure()
        return self.found_inf_flag

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, and also drops what amp holds of earlier passes."""
        if self._rows.are_used():
            self.param_table().gradients.zero_grad(set_to_none)
        else:
            super().zero_grad(set_to_none)

    # --- the decisions of a step ----------------------------------------------------------------

    def _verdict(self, max_norm: float) -> dict[str, Any]:
        """Arguments for ``StepPlan.update`` and ``decide``: what to inspect, whether to skip."""
        found_inf = self.__dict__.get("found_inf")
        if "found_inf" in self.__dict__:  # a GradScaler drives this step
            # torch's has a 0 that is no tensor if it saw no gradient.
            found_inf = found_inf if isinstance(found_inf, Tensor) else None
            inspect, skip = found_inf is None, True
        else:
            asked = self.skip_by_default if self.skip_nonfinite is None else self.skip_nonfinite
            inspect = asked or self._scales_dynamically
            skip = inspect or max_norm > 0
        if self._rehearsal is not None:
            found_inf, skip = self._rehearsal, True
        return {
            "found_inf": found_inf,
            "max_norm": max_norm,
            "inspect": inspect,
            "skip_nonfinite": skip,
        }

    @property
    def _scales_dynamically(self) -> bool:
        return self._under_amp and self.skip_on_overflow

    def _watch_skips(self, skipped: bool = False) -> None:
        """After a step that may have been skipped: say so, and raise if training has stopped.

        `skipped`: the host knows that it was.
        """
        if self._rehearsal is None and "found_inf" not in self.__dict__:
            self._skip_watch.after_step(self._rows.known(), skipped, not self._scales_dynamically)

    # --- state dicts and copies: see checkpoints.py ---------------------------------------------

    def _before_saving(self) -> None:
        self.follow_edits()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, plus ``master_param`` (float32) for each parameter that has a master.

        It says itself what it holds, and every mode loads every other's: a split master is in it
        as the whole one that it stands for (4 bytes a parameter while the dict lives), a state in
        BF16 under its name, one in 8 bits under the name with its type's suffix
        (``<name>_codes``) and ``<name>_scale``. torch.distributed.checkpoint gets those in float32,
        and all states from the beginning: with zeros and counts of 0 before the first gradient.
        """
        try:
            self._before_saving()
            state_dict = super().state_dict()
            return checkpoints.with_masters(self, state_dict, decoded=self._is_asked_by_torch)
        finally:
            self._is_asked_by_torch = False

    def torch_state_dict(self) -> dict[str, Any]:
        """`state_dict` with all states in float32, as torch's optimizer of the name loads it."""
        return checkpoints.in_float32(self, self.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, without rounding FP32 state to a half parameter's type.

        Accepts state dicts of the torch optimizer of the same name and, with or without masters,
        of ampfuse, whatever its states are stored in: they are stored here as this optimizer says.
        Masters that are not in the state dict are taken from the model weights; split ones are
        written together with their weights.

        Raises:
            ValueError: the state belongs to parameters of another number or shape, or is damaged,
                as one without ``exp_avg`` or with a step count of NaN.
            RuntimeError: in a swap_ema block. Nothing has changed then.
        """
        self._is_asked_by_torch = False
        self._check_not_swapped("load_state_dict()")
        if len(with_inner(self)) > 1:
            checkpoints.load_around(self, state_dict, super().load_state_dict)
        else:
            checkpoints.load(self, state_dict, super().load_state_dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called by load_state_dict, pickle and deepcopy alike.
        if self._loading is not None:
            checkpoints.restore_state(self, state, self._loading)
        # torch's looks for a step in each state; before the first there are masters alone, and the
        # state of another's step is not torch's.
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
        return {**super().__getstate__(), **own}


def amp_optimizers(optimizer: Any) -> list[AmpOptimizer]:
    """Those that amp knows among `optimizer` and what it wraps, the innermost last."""
    return [one for one in with_inner(optimizer) if isinstance(one, AmpOptimizer)]


def tells_schedulers(step: Function) -> Function:
    """Decorator of a step that sets ``_opt_called``: torch's schedulers need not wrap it then."""
    marked: Any = step
    marked._wrapped_by_lr_sched = True
    return step


def takes_scale(optimizer: Any) -> TypeGuard[AmpOptimizer]:
    """Whether its step unscales, inspects and skips by itself."""
    return isinstance(optimizer, AmpOptimizer) and optimizer._step_supports_amp_scaling


@contextlib.contextmanager
def driven(optimizer: AmpOptimizer, **by: Tensor | bool | None) -> Iterator[None]:
    """Steps in the block have a GradScaler's ``grad_scale`` and ``found_inf``, as torch has it."""
    for name, value in by.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:  # the next step may be made without a scaler
        for name in by:
            delattr(optimizer, name)
