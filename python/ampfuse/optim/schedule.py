"""A torch learning-rate scheduler as a table on the device, indexed by the applied steps.

``Scheduled.follow`` is the public side. The kernel that decides a step picks the table's row,
so a per-step schedule costs the host nothing, lives inside a captured graph, and waits while
overflows skip steps.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ampfuse.optim.base import AmpOptimizer

Group = dict[str, Any]

COLUMNS = ("lr", "weight_decay", "momentum", "beta1", "beta2")


class Schedule:
    """The hyper-parameters that change from step to step, of each parameter group.

    Attributes:
        columns: per group a float64 vector on the device for each name of ``COLUMNS`` that varies.
    """

    def __init__(self, columns: list[dict[str, Tensor]]) -> None:
        self.columns = columns

    def of_group(self, group: int) -> dict[str, Tensor]:
        """Empty for a group that was added after the table was made."""
        return self.columns[group] if group < len(self.columns) else {}

    def at(self, group: int, step: Tensor) -> dict[str, Tensor]:
        """The values of step `step` (int64, 0-dim, from 0): float64, 0-dim, on the device."""
        columns = self.of_group(group)
        # Not c[step]: an index of 0 dimensions is read on the host, which waits for the device.
        return {name: c.take(step.clamp(max=len(c) - 1)) for name, c in columns.items()}


class Scheduled(AmpOptimizer):
    """Mixin: ``follow`` a learning-rate scheduler step by applied step."""

    _schedule: Schedule | None = None
    # Where the schedule to come goes on, if a state dict was loaded first.
    _loaded_schedule_step: int | None = None

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

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
        table = self.param_table()
        if scheduler is None:
            self._end_schedule()
            return
        self._schedule = tabulate(self, scheduler, int(steps), self._hyper, table.param(0).device)
        table.state_field("schedule_step").fill_(self._loaded_schedule_step or 0)
        self._loaded_schedule_step = None

    def learning_rates(self) -> Tensor:
        """Each group's rate in the next applied step: float64, shape (groups,), on the device."""
        step = self.param_table().state_field("schedule_step")
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
        step = self._known_table().state_field("schedule_step")
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

    def _applied_steps(self) -> int:
        """How many steps were applied since the schedule began. Waits for the device."""
        if self._table is None:
            return int(self._schedule_step)
        return int(self._table.state_field("schedule_step"))

    def state_dict(self) -> dict[str, Any]:
        state_dict = super().state_dict()
        if self._schedule is not None:
            position = self._applied_steps()
            for group in state_dict["param_groups"]:
                group["schedule_step"] = position
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = False) -> None:
        super().load_state_dict(state_dict, strict=strict)
        positions = [group.pop("schedule_step", None) for group in self.param_groups]
        if positions and positions[0] is not None:
            position = int(positions[0])
            if self._schedule is None:
                self._loaded_schedule_step = position
            else:
                self.param_table().state_field("schedule_step").fill_(position)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._schedule is None:
            return state
        return {**state, "_schedule": self._schedule, "_schedule_step": self._applied_steps()}


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


def scheduled_values(group: Group) -> dict[str, float]:
    """What of a parameter group a schedule may change, as doubles."""
    values = {name: group[name] for name in COLUMNS if name in group}
    values.update(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))
    return {name: float(value) for name, value in values.items()}


def tabulate(
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
    steps: int,
    hyper: Callable[[Group], dict[str, Any]],
    device: torch.device,
) -> Schedule:
    """Run a copy of `scheduler` for `steps` steps on copies of `optimizer`'s groups.

    Neither is changed. `hyper` gives what the optimizer's kernel uses of a group.
    """
    _check(optimizer, scheduler, steps)
    groups = [_detached(group) for group in optimizer.param_groups]
    scheduler = _copy_onto(groups, optimizer, scheduler)
    start = [scheduled_values(group) for group in groups]
    others = [_unscheduled(hyper(group)) for group in groups]
    rows: list[list[dict[str, float]]] = [[values] for values in start]
    for step in range(1, steps):
        _advance(scheduler, step, steps)
        for i, group in enumerate(groups):
            rows[i].append(scheduled_values(group))
            if (now := _unscheduled(hyper(group))) != others[i]:
                name = next(name for name in now if now[name] != others[i][name])
                raise ValueError(
                    f"the scheduler changes {name} of parameter group {i}; a tabulated schedule "
                    f"holds {', '.join(COLUMNS)}"
                )
    columns = []
    for values, table in zip(start, rows, strict=True):
        column = {name: [row[name] for row in table] for name in values}
        if values.get("momentum") == 0 and any(column["momentum"]):
            raise ValueError(
                "the scheduler turns momentum on later; start with a momentum above 0, so that the "
                "momentum buffers are there"
            )
        columns.append(
            {
                name: torch.tensor(numbers, dtype=torch.float64, device=device)
                for name, numbers in column.items()
                if any(number != numbers[0] for number in numbers)
            }
        )
    return Schedule(columns)


def _check(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps is {steps}; a schedule has at least one step")
    for part in _parts(scheduler):
        if isinstance(part, ReduceLROnPlateau):
            raise TypeError(
                "ReduceLROnPlateau decides by a metric of the training to come, which no table "
                "can hold. Call its step(metric) yourself and do not follow it."
            )
        if not isinstance(part, LRScheduler):
            raise TypeError(
                f"follow takes a scheduler of torch.optim.lr_scheduler, not "
                f"{type(part).__name__}. A function of the step number fits in LambdaLR."
            )
        if part.optimizer is not optimizer:
            raise ValueError(f"this {type(part).__name__} schedules another optimizer")


def _parts(scheduler: Any) -> list[Any]:
    """`scheduler` and, for SequentialLR and ChainedScheduler, what it is composed of."""
    inner = getattr(scheduler, "_schedulers", ())
    return [scheduler, *(part for one in inner for part in _parts(one))]


def _detached(group: Group) -> Group:
    """A copy without parameters, numbers in place of tensors."""
    plain = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    plain = {name: v.item() if isinstance(v, Tensor) else v for name, v in plain.items()}
    return {**copy.deepcopy(plain), "params": []}


def _copy_onto(groups: list[Group], optimizer: Any, scheduler: LRScheduler) -> LRScheduler:
    """A copy of `scheduler` that writes to `groups` in place of `optimizer`'s."""

    def step() -> None: ...

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # what schedulers look for
    stand_in = SimpleNamespace(
        param_groups=groups, defaults=dict(optimizer.defaults), step=step, _opt_called=True
    )
    return copy.deepcopy(scheduler, {id(optimizer): stand_in})


def _unscheduled(hyper: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in hyper.items() if name not in COLUMNS}


def _advance(scheduler: LRScheduler, step: int, steps: int) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the order of calls, which is ours here
            scheduler.step()
    except Exception as error:
        raise ValueError(
            f"{type(scheduler).__name__} could not be tabulated for {steps} steps: its step "
            f"number {step} raised {type(error).__name__}: {error}"
        ) from error
