"""Fused optimizers that follow a table of learning rates on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ampfuse.optim.base import AmpOptimizer
from ampfuse.optim.schedule import Schedule, tabulate


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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
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
