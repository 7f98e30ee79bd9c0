"""An optimizer whose step a CUDA graph replays: what may change between replays."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ampfuse._schema import READ_ON_DEVICE
from ampfuse.optim.fused import FusedOptimizer
from ampfuse.optim.masters import leaf_of
from ampfuse.optim.param_groups import parameters

# For a parameter group: a rate that the kernel reads from a tensor, and the hyper-parameters.
_Group = tuple[Tensor | None, dict[str, Any]]


def _readable(lr: Tensor | None, hyper: dict[str, Any]) -> list[str]:
    """The hyper-parameters that a captured step can read on the device.

    These do not switch anything on or off. A rate that is a tensor is read there already.
    """
    names = [name for name in READ_ON_DEVICE if name in hyper and (name != "lr" or lr is None)]
    return [name for name in names if name != "momentum" or hyper[name] != 0]


PARAMETERS = "the memory (p.data = ..., model.to) or requires_grad of a parameter"


class CapturedOptimizer:
    """`optimizer` with a graph of its step; create it before the capture.

    Attributes:
        table: the optimizer's table at the capture.
        device: the device of its parameters.
        params, leaves: its parameters, and the leaves that autograd gives their gradients to.
    """

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = optimizer
        self.table = optimizer._rows.current_table()
        self.params = list(parameters(optimizer))
        self.leaves = list(map(leaf_of, self.params))
        self.device = self.table.param(0).device
        self._written = self._current_groups()
        # The numbers of the groups on the device, updated when they change.
        number = functools.partial(torch.tensor, dtype=torch.float64, device=self.device)
        self._values = [
            {name: number(hyper[name]) for name in _readable(lr, hyper)}
            for lr, hyper in self._written
        ]

    @contextlib.contextmanager
    def reading_values(self) -> Iterator[None]:
        """Steps that are captured in the block read the groups' numbers on the device."""
        optimizer = self._optimizer
        optimizer._on_device = self._values
        optimizer._hypers.forget()
        try:
            yield
        finally:
            optimizer._on_device = optimizer.clip_once = None
            optimizer._hypers.forget()

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Steps in the block are skipped; the states that they make stay in place from then on."""
        optimizer = self._optimizer
        optimizer._rehearsal = torch.ones((), device=self.device)
        try:
            yield
        finally:
            optimizer._rehearsal = None
        optimizer._states.pin()

    def step_state(self) -> Tensor:
        """The state of the step, as bytes: all its fields are in one storage."""
        storage = self.table.inspector.state_field("found_inf").untyped_storage()
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def fixed(self) -> dict[str, Any]:
        """Everything that needs a new capture if it changes, by its name in messages."""
        optimizer, table = self._optimizer, self.table
        is_known = optimizer._rows.table is table and table.matches(groups=optimizer.param_groups)
        fixed: dict[str, Any] = {
            "the optimizer's list of parameters": is_known,
            PARAMETERS: table.fingerprint(),
            "what momentum or amsgrad switch on": optimizer._states.wanted(),
        }
        for i, (lr, hyper) in enumerate(self._current_groups()):
            fixed[f"the tensor that is lr of parameter group {i}"] = id(lr)
            for name, value in hyper.items():
                if is_known and name not in self._values[i]:
                    fixed[f"{name} of parameter group {i}"] = value
        return fixed

    def named(self, what: str, then: Any, now: Any) -> str:
        """The name of `what`, a changed key of :meth:`fixed`, with the parameter that it is of."""
        if what != PARAMETERS:
            return what
        values = zip(memoryview(then).cast("q"), memoryview(now).cast("q"), strict=True)
        row, field = divmod(next(i for i, (a, b) in enumerate(values) if a != b), 3)
        what = "requires_grad" if field == 2 else "the memory (p.data = ..., model.to)"
        return f"{what} of {self.table.name(row)}"

    def follow_host(self) -> None:
        """Copy changes on the host since the last replay to the device."""
        with torch.no_grad():
            self._optimizer.ensure_bound()
            was, self._written = self._written, self._current_groups()
            for i, values in enumerate(self._values):
                for name, on_device in values.items():
                    if (value := self._written[i][1][name]) != was[i][1][name]:
                        on_device.fill_(value)
            self.table.masters.refresh()
        self._optimizer.zero_grad(set_to_none=True)

    def note_replay(self) -> None:
        """Record the step in versions of tensors, and for torch's schedulers. Look for skips."""
        self.table.plan.mark_stepped()
        self._optimizer._opt_called = True
        self._optimizer._watch_skips()

    def _current_groups(self) -> list[_Group]:
        return list(map(self._optimizer._hypers.of, self._optimizer.param_groups))
