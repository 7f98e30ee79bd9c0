"""A torch learning-rate scheduler as a table on the device, indexed by the applied steps.

``FusedOptimizer.follow`` is the public side. The kernel that decides a step picks the table's row,
so a per-step schedule costs the host nothing, lives inside a captured graph, and waits while
overflows skip steps.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ampfuse._schema import SCHEDULED

Group = dict[str, Any]


class Schedule:
    """The hyper-parameters that change from step to step, of each parameter group.

    Attributes:
        columns: per group a float64 vector on the device for each of ``SCHEDULED`` that varies.
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

    def write_to(self, groups: list[Group], step: Tensor) -> None:
        """Have `groups` hold the values of step `step`. Waits for the device."""
        for i, group in enumerate(groups):
            now = {name: value.item() for name, value in self.at(i, step).items()}
            if "beta1" in now or "beta2" in now:
                beta1, beta2 = group["betas"]
                group["betas"] = (now.pop("beta1", beta1), now.pop("beta2", beta2))
            for name, value in now.items():
                if isinstance(group[name], Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value


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
    names = [list(hyper(group)) for group in groups]
    tables: list[list[tuple[Any, ...]]] = [[] for _ in groups]
    for step in range(steps):
        if step > 0:
            _advance(scheduler, step, steps)
        for group, table in zip(groups, tables, strict=True):
            table.append(tuple(hyper(group).values()))
    columns = []
    for i, table in enumerate(tables):
        column = dict(zip(names[i], zip(*table, strict=True), strict=True))
        varies = {name: ns for name, ns in column.items() if any(n != ns[0] for n in ns)}
        for name in varies.keys() - set(SCHEDULED):
            raise ValueError(
                f"the scheduler changes {name} of parameter group {i}; a tabulated schedule "
                f"holds {', '.join(SCHEDULED)}"
            )
        if "momentum" in varies and column["momentum"][0] == 0:
            raise ValueError(
                "the scheduler turns momentum on later; start with a momentum above 0, so that the "
                "momentum buffers are there"
            )
        columns.append(
            {n: torch.tensor(of, dtype=torch.float64, device=device) for n, of in varies.items()}
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
