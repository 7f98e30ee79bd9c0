"""The fused step: unscale, overflow check, clip, update and cast back, in two passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ampfuse import _core
from ampfuse.optim.base import AmpOptimizer
from ampfuse.optim.masters import HALF_DTYPES
from ampfuse.optim.schedule import tabulate


class FusedOptimizer(AmpOptimizer):
    """Base of the optimizers whose update is a kernel of ours.

    A subclass names its kernel (`_algorithm`), the state a parameter of a group has
    (`_state_names`, in the kernel's order; `_columns`) and the kernel's hyper-parameters
    (`_hyper`, by the names of ``ParamTable.set_hyper``, and ``lr``, which may be a tensor).
    """

    # torch.amp.GradScaler then hands over `grad_scale` and `found_inf` instead of unscaling.
    _step_supports_amp_scaling = True

    _hyper_sent: list[Any]
    _bound: tuple[list[object], Any, list[tuple[str, ...]]]

    def __init__(
        self,
        params: Any,
        *args: Any,
        master_weights: bool = False,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        unscale_grads: bool = True,
        **kwargs: Any,
    ) -> None:
        """The arguments of the torch class that a subclass also inherits, and four of ours."""
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm}; it has to be positive, or None")
        super().__init__(params, *args, **kwargs)
        self.master_weights = bool(master_weights)
        self.max_grad_norm = max_grad_norm
        self.skip_nonfinite = bool(skip_nonfinite)
        self.unscale_grads = bool(unscale_grads)

    def _check_group(self, group: dict[str, Any]) -> None:
        if group.get("differentiable"):
            raise ValueError(
                "differentiable=True needs an update that autograd records, and a fused one is "
                f"not. Use torch.optim.{type(self).__name__}."
            )
        for param in group["params"]:
            if param.dtype not in (torch.float32, *HALF_DTYPES):
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

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        raise NotImplementedError

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

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
                devices; under amp, hundreds of steps in a row that were all skipped. TypeError: a
                float64 or complex gradient. Nothing has changed then.
        """
        self._check_gradients_are_unscaled()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        table = self._sync_rows()
        self._keep_bound()
        self._send_hyper()
        stateless = table.collect(self.__dict__.get("grad_scale"), self.unscale_grads)
        for row in stateless:
            self._init_state(row)
        if stateless:
            self._remember_bindings()
        max_norm, self._clip_once = self._clip_once or self.max_grad_norm or 0.0, None
        table.update(**self._verdict(max_norm))
        if torch.is_autocast_enabled(self._row_params[0].device.type):
            torch.clear_autocast_cache()  # it may hold casts of the weights as they were
        self._watch_skips()
        return loss

    # --- schedules ------------------------------------------------------------------------------

    _loaded_schedule_step: int | None = None

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
            TypeError: a scheduler that needs a metric, or that is not torch's. ValueError: it
                belongs to another optimizer, ends earlier, or changes another option.
        """
        device = self._sync_rows().param(0).device
        if scheduler is None:
            self._end_schedule()
            return
        self._schedule = tabulate(self, scheduler, int(steps), self._hyper, device)
        self._table.state_field("schedule_step").fill_(self._loaded_schedule_step or 0)
        self._loaded_schedule_step = None

    def learning_rates(self) -> Tensor:
        """Each group's rate in the next applied step: float64, shape (groups,), on the device."""
        step = self._sync_rows().state_field("schedule_step")
        rates = []
        for i, group in enumerate(self.param_groups):
            scheduled = self._schedule.at(i, step) if self._schedule is not None else {}
            rate = torch.as_tensor(scheduled.get("lr", group["lr"]), dtype=torch.float64)
            rates.append(rate.to(step.device).reshape(()))
        return torch.stack(rates)

    def _end_schedule(self) -> None:
        schedule, self._schedule = self._schedule, None
        if schedule is None:
            return
        step = self._table.state_field("schedule_step")
        for i, group in enumerate(self.param_groups):
            now = {name: value.item() for name, value in schedule.at(i, step).items()}
            if "beta1" in now or "beta2" in now:
                beta1, beta2 = group["betas"]
                group["betas"] = (now.pop("beta1", beta1), now.pop("beta2", beta2))
            for name, value in now.items():
                if isinstance(group[name], Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value

    def state_dict(self) -> dict[str, Any]:
        state_dict = super().state_dict()
        if self._schedule is not None:
            position = self._applied_steps()
            for group in state_dict["param_groups"]:
                group["schedule_step"] = position
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        positions = [group.pop("schedule_step", None) for group in self.param_groups]
        if positions and positions[0] is not None:
            position = int(positions[0])
            if self._schedule is None:
                self._loaded_schedule_step = position
            else:
                self._sync_rows().state_field("schedule_step").fill_(position)

    @torch.no_grad()
    def clip_next_step(self, max_norm: float) -> Tensor:
        if not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}; it has to be positive")
        table = self._sync_rows()
        table.collect(self.__dict__.get("grad_scale"), self.unscale_grads)
        table.measure()
        self._clip_once = float(max_norm)
        return table.state_field("sum_squares").sqrt().to(torch.float32)

    # --- hyper-parameters and state ---------------------------------------------------------------

    def _send_hyper(self) -> None:
        """Give the table each group's hyper-parameters, if they changed."""
        schedule = self._schedule
        row = 0
        for i, group in enumerate(self.param_groups):
            end = row + len(group["params"])
            lr, hyper = self._lr_and_hyper(group)
            table = schedule.of_group(i) if schedule is not None else {}
            sent = self._hyper_sent[i] if i < len(self._hyper_sent) else None
            known = sent is not None and sent[0] is lr and sent[1] is schedule
            if not known or sent[2:] != (row, end, hyper):
                if known:
                    refuse_unread(i, sent[-1], hyper, table)
                self._table.set_hyper(row, end, lr, hyper, table)
                del self._hyper_sent[i:]
                self._hyper_sent.append((lr, schedule, row, end, hyper))
            row = end

    def _lr_and_hyper(self, group: dict[str, Any]) -> tuple[Tensor | None, dict[str, Any]]:
        """The rate, if the kernel reads it from a tensor on the device, and all the rest."""
        hyper = self._hyper(group)
        if self._layerwise is not None:
            hyper.update(self._layerwise.hyper)
        lr = hyper["lr"]
        if not isinstance(lr, Tensor):
            return None, hyper
        on_device = lr.device == self._row_params[0].device and lr.dtype == torch.float32
        hyper["lr"] = 0.0 if on_device else float(lr)
        return (lr if on_device else None), hyper

    def _group_of(self, row: int) -> dict[str, Any]:
        for group in self.param_groups:
            if row < len(group["params"]):
                return group
            row -= len(group["params"])
        raise IndexError(row)

    def _init_state(self, row: int) -> None:
        """State for a row, zeros where there is none; step counts are views of one column."""
        state = self.state[self._row_params[row]]
        param = self._table.param(row)
        tensors = []
        for name in self._state_names(self._group_of(row)):
            value = state.get(name)
            if value is None:
                value = _core.C.empty_laid_out_as(param).fill_(self._initial_state)
            elif value.shape != param.shape:
                raise ValueError(
                    f"{name} of {self._table.name(row)} was given shape {tuple(value.shape)}, and "
                    f"the parameter has {tuple(param.shape)}. Assign one of that shape, or delete "
                    "the state to start anew."
                )
            elif value.dtype != torch.float32 or value.stride() != param.stride():
                value = _core.C.empty_laid_out_as(param).copy_(value)
            pinned = self._pinned_states.get((row, name), value)
            if pinned is not value:
                pinned.copy_(value)
            state[name] = pinned
            tensors.append(pinned)
        self._table.set_states(row, tensors)
        self._bind_columns(state, row)

    @property
    def _initial_state(self) -> float:
        """What a fresh state is filled with."""
        return 0.0

    def _columns(self) -> dict[str, Tensor]:
        """State that is one number a parameter, by name: float32 columns of the table."""
        return {"step": self._table.steps()}

    def _bind_columns(self, state: dict[str, Any], row: int) -> None:
        for name, column in self._columns().items():
            state[name] = column[row]

    def _saved_number(self, state: dict[str, Any], name: str) -> Any:
        """The number of a state that was loaded or copied; 0 for a fresh one."""
        return state.get(name, 0)

    # What `_bind_states` depends on: every state object, and which states the groups need. It
    # changes when somebody clears or exchanges states, or switches momentum or amsgrad on.

    def _keep_bound(self) -> None:
        """Bind the states anew if somebody loaded, cleared or exchanged some."""
        if not self._states_bound or not self._is_bound():
            self._bind_states()

    def _pin_states(self) -> None:
        """From now on states keep their memory, which a captured graph knows by address.

        What is loaded or assigned is copied into it.
        """
        for row, param in enumerate(self._row_params):
            for name in self._state_names(self._group_of(row)):
                if isinstance(value := self.state.get(param, {}).get(name), Tensor):
                    self._pinned_states[row, name] = value

    def _remember_bindings(self) -> None:
        states, versions = _core.C.flattened(self.state), _core.C.DictVersions(self.state)
        self._bound = (states, versions, self._state_names_by_group())

    def _is_bound(self) -> bool:
        states, versions, names = self._bound
        if names != self._state_names_by_group():
            return False
        if versions.hold(self.state):
            return True
        if not _core.C.holds(self.state, states):
            return False
        # The same objects, assigned again; or Python does not count.
        self._bound = (states, _core.C.DictVersions(self.state), names)
        return True

    def _state_names_by_group(self) -> list[tuple[str, ...]]:
        return [self._state_names(group) for group in self.param_groups]

    def _bind_states(self) -> None:
        """After a load, a copy, an edit or new rows: the table takes over ``self.state``."""
        self._hyper_sent = []
        for name, column in self._columns().items():
            saved = []
            for param in self._row_params:
                number = self._saved_number(self.state.get(param, {}), name)
                number = torch.as_tensor(number, dtype=torch.float32, device=column.device)
                saved.append(number.reshape(()))
            if saved:
                column.copy_(torch.stack(saved))
        for row, param in enumerate(self._row_params):
            names = self._state_names(self._group_of(row))
            state = self.state.get(param, {})
            known = any(name in state or (row, name) in self._pinned_states for name in names)
            if "step" in state or known:
                self._init_state(row)
            else:
                self._table.set_states(row, None)  # made at the row's next gradient
        self._remember_bindings()
        self._states_bound = True


def refuse_unread(
    group: int, sent: dict[str, Any], hyper: dict[str, Any], scheduled: Iterable[str]
) -> None:
    """Somebody writes to a group what its schedule's table replaces."""
    for name in scheduled:
        if sent[name] != hyper[name]:
            raise RuntimeError(
                f"{name} of parameter group {group} was changed from {sent[name]} to "
                f"{hyper[name]}, but the optimizer follows a tabulated schedule and does not read "
                "it. Do not call scheduler.step() after optimizer.follow(scheduler, ...), or end "
                "that with optimizer.follow(None)."
            )


def moment_hyper(group: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters that all of the Adam family have, for ``_hyper``."""
    beta1, beta2 = group["betas"]
    return {
        "lr": group["lr"],
        "weight_decay": float(group["weight_decay"]),
        "beta1": float(beta1),
        "beta2": float(beta2),
        "eps": float(group["eps"]),
        "uncorrected": not group.get("bias_correction", True),
    }


def check_range(*, lr: Any, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise ValueError for what no optimizer of the Adam family takes, in torch's words."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    for i, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
    if not eps >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}")
    if not weight_decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")
