"""What every optimizer under amp shares: rows, gradients between backward and step, checkpoints.

`AmpOptimizer` is a mixin over a ``torch.optim.Optimizer``. The fused optimizers add a step of their
own (fused.py), any other optimizer keeps its own (generic.py). The gradients themselves are in the
extension's ``ParamTable``; csrc/param_table.h says where they are at which time.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ampfuse import _core
from ampfuse.optim import left_scaled, saved_state
from ampfuse.optim.inner import with_inner
from ampfuse.optim.masters import HALF_DTYPES, MasterParameter, exact_float32
from ampfuse.optim.skip_watch import SkipWatch

if TYPE_CHECKING:
    from ampfuse.optim.larc import Layerwise
    from ampfuse.optim.schedule import Schedule

_OPTIONS = (
    "master_weights",
    "max_grad_norm",
    "skip_nonfinite",
    "unscale_grads",
    "skip_on_overflow",
    "_under_amp",
    "_names",
    "_schedule",
    "_amp_session",  # amp's policy and loss scalers: a copy trains on under amp
)


class LastStep:
    """What an optimizer's last step decided, as device tensors; reading one is what waits.

    Attributes (each a 0-dim tensor on the parameters' device, copied at the time of asking):
        skipped: float32, 1 if the step was skipped because a gradient held inf or NaN, else 0.
        grad_norm: float32, the L2 norm of the unscaled gradients before clipping; NaN if they were
            not finite. Known only if the step inspected gradients (scaling, clipping).
        loss_scale: float32, the scale the gradients were made with.
    """

    def __init__(self, table: Any) -> None:
        self._table = table

    def _field(self, name: str) -> Tensor:
        return self._table.state_field(name).clone()

    @property
    def skipped(self) -> Tensor:
        return self._field("skip")

    @property
    def grad_norm(self) -> Tensor:
        return self._field("grad_norm")

    @property
    def loss_scale(self) -> Tensor:
        return self._field("loss_scale")

    def overflow(self) -> dict[str, Any] | None:
        """Where the latest overflow was, or None if there was none. Waits for the device.

        Returns:
            ``parameter`` (name of the first parameter whose gradient was not finite), ``kind``
            (``"inf"`` or ``"nan"``) and ``skipped_steps`` (how many steps were skipped so far).
        """
        row = int(self._table.state_field("last_bad_row"))
        if row < 0:
            return None
        bits = int(self._table.state_field("last_bad_bits"))
        return {
            "parameter": self._table.name(row),
            "kind": "nan" if bits > 0x7F800000 else "inf",
            "skipped_steps": int(self._table.state_field("skipped_steps")),
        }


class AmpOptimizer(torch.optim.Optimizer):
    """Mixin: an optimizer that amp can scale, inspect and skip."""

    _algorithm = "none"

    master_weights: bool = False
    max_grad_norm: float | None = None
    skip_nonfinite: bool = False
    unscale_grads: bool = True
    # Under amp: whether an overflow skips the step (dynamic scaling) or not (a static scale).
    skip_on_overflow: bool = True
    in_backward: bool = False

    _under_amp: bool = False
    _names: dict[int, str] | None = None
    _table: Any = None
    _row_params: list[Tensor]
    # Half parameters that were frozen when masters were made, and have none; None = look again.
    _frozen: list[Tensor] | None = None
    _left_scaled: ClassVar[dict[int, left_scaled.Mark]] = {}
    # State tensors, by row and name, that a captured graph works on.
    _pinned_states: dict[tuple[int, str], Tensor]
    _states_bound = False
    _loading: dict[str, Any] | None = None
    _schedule: Schedule | None = None
    # Where a table that is made anew goes on in the schedule; the table counts from there.
    _schedule_step: Tensor | int = 0
    _clip_once: float | None = None
    _skip_watch: SkipWatch | None = None
    # A 1 on the device while steps are rehearsed: each is skipped, whatever its gradients are.
    _rehearsal: Tensor | None = None
    # Set by LARC for the time of a step of its own.
    _layerwise: Layerwise | None = None

    # --- rows ---------------------------------------------------------------------------------

    # Not `_params`, which LBFGS has.
    def _amp_params(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _sync_rows(self) -> Any:
        """The table, with a row for each parameter of ``param_groups`` in order."""
        if self._under_amp and self.master_weights:
            self._master_the_unfrozen()
        if self._table is not None and self._has_params(self._row_params):
            return self._table
        params = list(self._amp_params())
        if self._table is not None:
            known = self._row_params
            appended = len(known) < len(params) and all(map(operator.is_, known, params))
            if not appended:  # replaced, reordered or taken out
                self._table.refresh_masters()
                self._forget_rows()
        if self._table is None:
            if not params:
                raise RuntimeError("the optimizer has no parameters; add a parameter group first")
            self._table = _core.C.ParamTable(self._algorithm, params[0].device)
            self._table.state_field("schedule_step").add_(self._schedule_step)
            self._row_params, self._pinned_states = [], {}
        names = self._parameter_names()
        for i in range(len(self._row_params), len(params)):
            self._add_row(params[i], names[i])
            self._row_params.append(params[i])
        self._states_bound = False
        return self._table

    def _has_params(self, known: list[Tensor]) -> bool:
        """Whether the groups hold the very parameters of `known`, in that order."""
        return _core.C.holds([group["params"] for group in self.param_groups], known)

    def _master_the_unfrozen(self) -> None:
        if self._frozen is None:
            self._frozen = [param for param in self._amp_params() if param.dtype in HALF_DTYPES]
        if any(param.requires_grad for param in self._frozen):
            self.materialize_gradients()
            install_masters(self)

    def _add_row(self, param: Tensor, name: str) -> None:
        if isinstance(param, MasterParameter):
            param.set_owner(self)
            stepped, model, version = param, param.model_param, param.model_version
        elif self.master_weights and param.dtype in HALF_DTYPES and not self._under_amp:
            state = self.state[param]
            version = state.pop("_model_version", param._version)
            if "master_param" not in state:
                state["master_param"] = exact_float32(param)
            stepped, model = state["master_param"], param
        else:
            stepped, model, version = param, None, 0
        self._table.add_row(stepped, model, name, version)

    def _applied_steps(self) -> int:
        """How many steps were applied since the schedule began. Waits for the device."""
        if self._table is None:
            return int(self._schedule_step)
        return int(self._table.state_field("schedule_step"))

    def _parameter_names(self) -> list[str]:
        names = []
        for i, group in enumerate(self.param_groups):
            given = group.get("param_names") or [None] * len(group["params"])
            for j, param in enumerate(group["params"]):
                leaf = param.model_param if isinstance(param, MasterParameter) else param
                known = (self._names or {}).get(id(leaf)) or given[j]
                shape = tuple(param.shape)
                names.append(known or f"param_groups[{i}]['params'][{j}] of shape {shape}")
        return names

    def _forget_rows(self) -> None:
        if self._table is not None:
            self._schedule_step = self._table.state_field("schedule_step").clone()
        self._table = None
        self._frozen = None
        self._states_bound = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; under amp half-precision parameters of the group get FP32 masters."""
        super().add_param_group(param_group)
        if not (self._under_amp and self.master_weights):
            return
        *groups, added = self.param_groups
        known = [p for g in groups for p in g["params"] if isinstance(p, MasterParameter)]
        if not {id(p.model_param) for p in known}.isdisjoint(map(id, added["params"])):
            self.param_groups.pop()
            raise ValueError("some parameters appear in more than one parameter group")
        install_masters(self)

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The state of the parameter's shape that a step of ours has in `group`."""
        return ()

    # --- gradients between backward and step --------------------------------------------------

    def begin_backward(self) -> None:
        """Put earlier gradients away, so that a backward pass brings new ones only."""
        if self._left_scaled:
            left_scaled.warn_if_used(self)
        self._sync_rows().begin_backward()
        self.in_backward = True

    def end_backward(self, scale: Tensor, check: bool) -> None:
        """Take in a pass whose gradients carry `scale` (float32, 0-dim): inspect and unscale."""
        self.in_backward = False
        self._table.end_backward(scale, check)

    def mark_backward(self, scale: Tensor) -> None:
        """Take in a pass, but leave its gradients scaled until the next pass or the step."""
        self.in_backward = False
        self._table.mark_backward(scale)

    def cancel_backward(self) -> None:
        """The pass failed: drop what it left and keep what was there before."""
        self.in_backward = False
        self._table.cancel_backward()

    def materialize_gradients(self) -> None:
        """Put FP32 unscaled gradients into the masters, if they are not there yet."""
        if self._table is not None and not self.in_backward:
            self._table.materialize()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take over every edit of the model's half weights, those made through ``.data`` too.

        Edits that autograd can see (``load_state_dict``, ``clamp_`` under ``no_grad``, assigning
        ``.data``) are followed by themselves at the next step; an in-place change of ``p.data``
        leaves no trace, and needs this call before the step. Other elements keep their bits.
        """
        self._sync_rows().refresh_masters(all=True)

    @property
    def found_inf_flag(self) -> Tensor:
        """float32, 0-dim, on the device: 1 if a gradient since the last step was not finite."""
        return self._sync_rows().state_field("found_inf")

    @property
    def pass_found_inf_flag(self) -> Tensor:
        """float32, 0-dim, on the device: 1 if a gradient of the last backward pass was not finite.

        Passes with ``delay_unscale`` before it belong to it: nobody looked at their gradients then.
        """
        return self._sync_rows().state_field("pass_found_inf")

    @property
    def last_step(self) -> LastStep:
        """What the last step decided; see :class:`LastStep`."""
        return LastStep(self._sync_rows())

    def unscale_gradients(self, scale: Tensor) -> Tensor:
        """Divide all gradients by `scale` now, exactly: what ``GradScaler.unscale_`` needs.

        FP32 gradients are divided in place. Half gradients of a parameter outside amp become FP32
        ones, because rounding them back to half would flush small values to zero.

        Returns:
            The flag, float32 and 0-dim: 1 if a gradient was not finite.
        """
        table = self._sync_rows()
        if any(isinstance(param, MasterParameter) for param in self._row_params):
            table.end_backward(scale, True)
            return self.found_inf_flag
        params = [param for param in self._row_params if param.grad is not None]
        grads = [param.grad for param in params]
        unscaled = [
            torch.empty_like(grad, dtype=torch.float32) if grad.dtype in HALF_DTYPES else grad
            for grad in grads
        ]
        inv_scale = scale.to(torch.float64).reciprocal().to(torch.float32)
        _core.C.unscale(grads, unscaled, inv_scale, self.found_inf_flag)
        for param, grad in zip(params, unscaled, strict=True):
            if param.grad is not grad:
                param.grad_dtype = None  # torch: any dtype may stand in .grad
                param.grad = grad
        return self.found_inf_flag

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, and also drops what amp holds of earlier passes."""
        if self._table is not None:
            self._sync_rows().zero_grad(set_to_none)
            return
        for param in self._amp_params():
            if isinstance(param, MasterParameter) and param.model_param.grad is not None:
                if set_to_none:
                    param.model_param.grad = None
                else:
                    param.model_param.grad.detach_().zero_()
        super().zero_grad(set_to_none)

    def clip_next_step(self, max_norm: float) -> Tensor:
        """Clip the gradients of the next step to the L2 norm `max_norm`.

        Returns:
            The norm of all unscaled gradients before clipping: float32, 0-dim, on the device.
        """
        raise NotImplementedError

    # --- the decisions of a step --------------------------------------------------------------

    def _check_gradients_are_unscaled(self) -> None:
        if self.in_backward:
            raise RuntimeError(
                "step() was called inside the scale_loss context, where gradients are still "
                "scaled. Call optimizer.step() after the with block."
            )
        if self._left_scaled:
            left_scaled.warn_if_used(self)

    def _verdict(self, max_norm: float) -> dict[str, Any]:
        """Arguments for ``ParamTable.update`` and ``decide``: what to inspect, whether to skip."""
        found_inf = self.__dict__.get("found_inf")
        if "found_inf" in self.__dict__:  # a GradScaler drives this step
            inspect, skip = found_inf is None, True
        elif self._under_amp:
            inspect = skip = self.skip_on_overflow
        else:
            inspect, skip = self.skip_nonfinite, self.skip_nonfinite or max_norm > 0
        if self._rehearsal is not None:
            found_inf, skip = self._rehearsal, True
        return {
            "found_inf": found_inf,
            "max_norm": max_norm,
            "inspect": inspect,
            "skip_nonfinite": skip,
        }

    def _watch_skips(self) -> None:
        """After a step: tell of skipped ones; raise if training has stopped without a word."""
        if not (self._under_amp and self.skip_on_overflow):
            return
        if self._skip_watch is None:
            self._skip_watch = SkipWatch()
        session = self.__dict__.get("_amp_session")
        tell = session is not None and session.tells_skips
        self._skip_watch.after_step(self._table, tell=tell)

    # --- checkpoints, copies --------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's, plus ``master_param`` (float32) for each parameter that has a master."""
        self._follow_edits()
        state_dict = super().state_dict()
        states = state_dict.setdefault("state", {})  # a wrapper's own format may have none
        for i, param in enumerate(self._amp_params()):
            if isinstance(param, MasterParameter):
                states[i] = {**states.get(i, {}), "master_param": param.detach()}
        return state_dict

    @torch.no_grad()
    def _follow_edits(self) -> None:
        """Before masters are saved or copied: what was edited in the model since is in them."""
        if (
            self._table is not None
            or any("master_param" in state for state in self.state.values())
            or any(isinstance(param, MasterParameter) for param in self._amp_params())
        ):
            self._sync_rows().refresh_masters()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, without rounding FP32 state to a half parameter's type.

        Accepts state dicts of the torch optimizer of the same name and, with or without masters,
        of ampfuse. Masters that are not in the state dict are taken from the model weights.

        Raises:
            ValueError: the state belongs to parameters of another number or shape. Nothing has
                changed then.
        """
        if len(with_inner(self)) > 1:
            self._load_around(state_dict)
            return
        handle = self.register_load_state_dict_pre_hook(_check_and_remember)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._loading = None

    def _load_around(self, state_dict: dict[str, Any]) -> None:
        """A wrapper hands the state to the optimizers in it, which know no masters."""
        params = list(self._amp_params())
        rest, masters = saved_state.without_masters(state_dict)
        for i, master in masters.items():
            if i < len(params):
                _check_shape("master_param", master, params[i], self._parameter_names()[i])
        super().load_state_dict(rest)
        for i, param in enumerate(self._amp_params()):
            if i in masters:
                self._restore_master(param, {}, masters[i].detach().to(param.device, torch.float32))

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called by load_state_dict, pickle and deepcopy alike.
        if self._loading is not None:
            self._restore_state(state["state"], self._loading)
        super().__setstate__(state)
        self._states_bound = False

    def _restore_state(self, state: dict[Any, Any], saved: dict[str, Any]) -> None:
        """Undo torch's casts to the parameter's dtype, and put masters where they belong."""
        ids = [i for group in saved["param_groups"] for i in group["params"]]
        dtypes = saved.get(saved_state.DTYPES, {})
        for i, param in zip(ids, self._amp_params(), strict=True):
            was = saved["state"].get(i)
            if not isinstance(was, dict):
                continue
            for key, value in was.items():
                if key == "master_param":
                    exact = value.detach().to(device=param.device, dtype=torch.float32, copy=True)
                    self._restore_master(param, state[param], exact)
                elif key != "step":  # torch knows where and in which type that belongs
                    loaded = state[param][key]
                    state[param][key] = saved_state.uncast(value, loaded, param, dtypes.get(i))
            held = self._table is not None and "master_param" in self.state.get(param, {})
            if held and "master_param" not in state[param]:  # the weight is all that was saved
                self._restore_master(param, state[param], exact_float32(param))

    def _restore_master(self, param: Tensor, state: dict[str, Any], master: Tensor) -> None:
        state.pop("master_param", None)
        if isinstance(param, MasterParameter):
            with torch.no_grad():
                param.copy_(master)
            param.model_version = param.model_param._version
        elif self.master_weights and param.dtype in HALF_DTYPES:
            old = self.state[param].get("master_param") if self._table is not None else None
            if old is not None:  # the table's row holds this tensor
                old.copy_(master)
                master = old
            state["master_param"] = master
            state["_model_version"] = param._version
        if self._table is not None:
            # Loading the model before or after this gives the weights these masters round to.
            self._table.accept_model_weights()
            state.pop("_model_version", None)

    def __getstate__(self) -> dict[str, Any]:
        self._follow_edits()
        state = super().__getstate__()
        options = {key: self.__dict__[key] for key in _OPTIONS if key in self.__dict__}
        options.pop("_names", None)  # keyed by the identity of parameters, which a copy has not
        if self._schedule is not None:
            options["_schedule_step"] = self._applied_steps()
        return {**state, **options}


def install_masters(optimizer: torch.optim.Optimizer) -> None:
    """Replace half parameters in `optimizer`'s groups by FP32 masters, in place, state and all.

    So also in the optimizers that it wraps, whether or not they share groups and state with it.
    """
    optimizers = with_inner(optimizer)
    masters: dict[Tensor, MasterParameter] = {}
    for group in [group for each in optimizers for group in each.param_groups]:
        for i, param in enumerate(group["params"]):
            if param.dtype not in HALF_DTYPES or not param.requires_grad:
                continue
            if param not in masters:
                masters[param] = MasterParameter.of(param)
            group["params"][i] = masters[param]
    for state in [getattr(each, "state", {}) for each in optimizers]:
        for param in [key for key in state if isinstance(key, Tensor) and key in masters]:
            kept, master = state.pop(param), masters[param]
            # Edits of the weight since its master was loaded are followed, as with any master.
            master.model_version = kept.pop("_model_version", master.model_version)
            if "master_param" in kept:  # loaded before, or a standalone optimizer's own
                with torch.no_grad():
                    master.copy_(kept.pop("master_param"))
            state[master] = {key: _widened(value) for key, value in kept.items()}
    optimizer._frozen = None  # type: ignore[attr-defined]


def _widened(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in HALF_DTYPES
    return value.to(torch.float32) if is_half else value


def _check_and_remember(optimizer: AmpOptimizer, state_dict: dict[str, Any]) -> None:
    """Pre-hook of load_state_dict: refuse what does not fit before anything changes.

    Only what a step of ours reads is known to have its parameter's shape; the rest is free.
    """
    names = iter(optimizer._parameter_names())
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        if len(group["params"]) != len(saved["params"]):
            break  # torch says what is wrong
        keys = ("master_param", *optimizer._state_names({**group, **saved}))
        for param, i, name in zip(group["params"], saved["params"], names, strict=False):
            state = state_dict["state"].get(i)
            for key in keys if isinstance(state, dict) else ():
                _check_shape(key, state.get(key), param, name)
    optimizer._loading = state_dict


def _check_shape(key: str, value: Any, param: Tensor, name: str) -> None:
    if isinstance(value, Tensor) and value.shape != param.shape:
        raise ValueError(
            f"the state dict's {key} for {name} has shape {tuple(value.shape)}, the parameter "
            f"{tuple(param.shape)}: it was saved from another model. Nothing was loaded."
        )
