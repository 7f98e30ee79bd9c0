"""The state of fused optimizers: who has which, and the table's view of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampfuse import _core
from ampfuse.optim.base import AmpOptimizer

# By algorithm: the states of the parameter's shape, in the kernel's order.
STATES = {name: tuple(states) for name, states in _core.C.algorithms().items()}


class States(AmpOptimizer):
    """Mixin: an optimizer whose table works on the tensors of ``self.state``.

    A subclass names its algorithm (`_algorithm`) and says which of its states a parameter of a
    group has (`_state_names`), where that is not all, and which numbers (`_columns`).
    """

    # What `_bind_states` depends on: every state object, and which states the groups need. It
    # changes when somebody clears or exchanges states, or switches momentum or amsgrad on.
    _bound: tuple[list[object], Any, list[tuple[str, ...]]]

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return STATES[self._algorithm]

    @property
    def _initial_state(self) -> float:
        """What a fresh state is filled with."""
        return 0.0

    def _columns(self) -> dict[str, Tensor]:
        """State that is one number a parameter, by name: float32 columns of the table."""
        return {"step": self._known_table().steps()}

    def _bind_columns(self, state: dict[str, Any], row: int) -> None:
        for name, column in self._columns().items():
            state[name] = column[row]

    def _saved_number(self, state: dict[str, Any], name: str) -> Any:
        """The number of a state that was loaded or copied; 0 for a fresh one."""
        return state.get(name, 0)

    def _group_of(self, row: int) -> dict[str, Any]:
        for group in self.param_groups:
            if row < len(group["params"]):
                return group
            row -= len(group["params"])
        raise IndexError(row)

    def _init_state(self, row: int) -> None:
        """State for a row, zeros where there is none; step counts are views of one column."""
        table = self._known_table()
        state = self.state[self._row_params[row]]
        param = table.param(row)
        tensors = []
        for name in self._state_names(self._group_of(row)):
            value = state.get(name)
            if value is None:
                value = _core.C.empty_laid_out_as(param).fill_(self._initial_state)
            elif value.shape != param.shape:
                raise ValueError(
                    f"{name} of {table.name(row)} was given shape {tuple(value.shape)}, and "
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
        table.set_states(row, tensors)
        self._bind_columns(state, row)

    def pin_states(self) -> None:
        """From now on states keep their memory, which a captured graph knows by address.

        What is loaded or assigned is copied into it.
        """
        for row, param in enumerate(self._row_params):
            for name in self._state_names(self._group_of(row)):
                if isinstance(value := self.state.get(param, {}).get(name), Tensor):
                    self._pinned_states[row, name] = value

    def keep_bound(self) -> None:
        """Bind the states anew if somebody loaded, cleared or exchanged some."""
        if not self._states_bound or not self._is_bound():
            self._bind_states()

    def state_names_by_group(self) -> list[tuple[str, ...]]:
        return [self._state_names(group) for group in self.param_groups]

    def _remember_bindings(self) -> None:
        states, versions = _core.C.flattened(self.state), _core.C.DictVersions(self.state)
        self._bound = (states, versions, self.state_names_by_group())

    def _is_bound(self) -> bool:
        states, versions, names = self._bound
        if names != self.state_names_by_group():
            return False
        if versions.hold(self.state):
            return True
        if not _core.C.holds(self.state, states):
            return False
        # The same objects, assigned again; or Python does not count.
        self._bound = (states, _core.C.DictVersions(self.state), names)
        return True

    def _bind_states(self) -> None:
        """After a load, a copy, an edit or new rows: the table takes over ``self.state``."""
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
                self._known_table().set_states(row, None)  # made at the row's next gradient
        self._remember_bindings()
        self._states_bound = True
