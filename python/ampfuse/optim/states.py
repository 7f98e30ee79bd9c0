"""The state of fused optimizers: who has which, and the table's view of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampfuse import _core
from ampfuse.optim.base import AmpOptimizer
from ampfuse.optim.checks import check
from ampfuse.optim.kept import PACKABLE, STATES, Kept, mode_for
from ampfuse.optim.masters import exact_float32
from ampfuse.optim.options import RULES, StateMode, changed_too_late
from ampfuse.optim.shards import local, on_shards


class States(AmpOptimizer):
    """Mixin: an optimizer whose table works on the tensors of ``self.state``.

    A subclass names its algorithm (`_algorithm`) and says which of its states a parameter of a
    group has (`_state_names`), where that is not all, and which numbers (`_columns`).
    """

    # What `_bind_states` depends on: every state object, which states the groups need, and whether
    # there are averages. It changes when somebody clears or exchanges states, or switches momentum,
    # amsgrad or averages on.
    _bound: tuple[list[object], Any, list[tuple[StateMode, tuple[str, ...]]], bool]
    _whole = ("master_param", "ema")
    _numbers: tuple[str, ...] = ("step",)

    def _kept(self, group: dict[str, Any]) -> tuple[Kept, ...]:
        """The states that a parameter of `group` has."""
        return Kept.of(self._algorithm, self._state_names(group))

    def _mode_of(self, group: dict[str, Any]) -> StateMode:
        """What `group` asks for. Raises ValueError for what does not exist."""
        mode: StateMode = group.get("state_dtype") or self.state_dtype
        check("state_dtype", mode, RULES["state_dtype"])
        if mode == "8bit" and self._algorithm not in PACKABLE:
            raise ValueError(
                f"{type(self).__name__} keeps no states in 8 bits; state_dtype='8bit' is for SGD, "
                "Adam, AdamW, Adagrad and Lion. Use 'bf16' or 'fp32'."
            )
        return mode

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

    def _saved_number(self, state: dict[str, Any], row: int, name: str) -> Any:
        """The number of a state that was loaded or copied; 0 for a fresh one."""
        return state.get(name, 0)

    def _group_of(self, row: int) -> dict[str, Any]:
        for group in self.param_groups:
            if row < len(group["params"]):
                return group
            row -= len(group["params"])
        raise IndexError(row)

    def _init_state(self, row: int) -> None:
        """State for a row, in its mode; zeros where there is none. Counts are views of a column."""
        with on_shards(self.state[self._row_params[row]], self._row_params[row]) as state:
            self._bind_row(row, state)
        self._bind_columns(self.state[self._row_params[row]], row)

    def _bind_row(self, row: int, state: dict[str, Any]) -> None:
        table = self._known_table()
        param, group = table.param(row), self._group_of(row)
        mode = mode_for(self._mode_of(group), self._row_params[row])
        tensors, scales = [], []
        for kept in self._kept(group):
            found = [value for key in kept.keys if (value := state.get(key)) is not None]
            if found and found[0].shape != param.shape:
                raise ValueError(
                    f"{kept.name} of {table.name(row)} was given shape {tuple(found[0].shape)}, "
                    f"and the parameter has {tuple(param.shape)}. Assign one of that shape, or "
                    "delete the state to start anew."
                )
            fits = found and kept.mode_in(state) == mode and found[0].stride() == param.stride()
            if not found and self._initial_state == 0:
                kept.put_zeros(state, param, mode)
            elif not fits or (mode == "fp32" and found[0].dtype != torch.float32):
                values = _core.C.empty_laid_out_as(param).fill_(self._initial_state)
                if found:
                    values.copy_(kept.values(state))
                kept.put(state, values, mode)
            self._use_pinned(row, state, kept.keys_in(mode))
            first, *scale = (state[key] for key in kept.keys_in(mode))
            tensors.append(first)
            scales.append(scale[0] if scale else None)
        table.set_states(row, tensors, scales, self._average(row, state))

    def _average(self, row: int, state: dict[str, Any]) -> Tensor | None:
        """The moving average of a row, which starts as the parameter is now."""
        if self.ema_decay is None:  # one that was loaded would be saved again as it was
            state.pop("ema", None)
            return None
        if state.get("ema") is None:
            state["ema"] = exact_float32(self.master_of(row))
        self._use_pinned(row, state, ("ema",))
        return state["ema"]

    def _use_pinned(self, row: int, state: dict[str, Any], keys: tuple[str, ...]) -> None:
        """Put the tensors back that a captured graph knows, with what is in the state now."""
        for key in keys:
            pinned = self._pinned_states.get((row, key), state[key])
            if pinned is not state[key]:
                pinned.copy_(state[key])
            state[key] = pinned

    def pin_states(self) -> None:
        """From now on states keep their memory, which a captured graph knows by address.

        What is loaded or assigned is copied into it.
        """
        for row, param in enumerate(self._row_params):
            for key in self._keys_of(row):
                if isinstance(value := self.state.get(param, {}).get(key), Tensor):
                    self._pinned_states[row, key] = local(value)

    def _keys_of(self, row: int) -> list[str]:
        """What the states of a row may stand under."""
        return [*(key for kept in self._kept(self._group_of(row)) for key in kept.keys), "ema"]

    def keep_bound(self) -> None:
        """Bind the states anew if somebody loaded, cleared or exchanged some."""
        if not self._states_bound or not self._is_bound():
            self._bind_states()

    def states_by_group(self) -> list[tuple[StateMode, tuple[str, ...]]]:
        """How states are kept, and which."""
        return [(self._mode_of(group), self._state_names(group)) for group in self.param_groups]

    def _remember_bindings(self) -> None:
        states, versions = _core.C.flattened(self.state), _core.C.DictVersions(self.state)
        self._bound = (states, versions, self.states_by_group(), self.ema_decay is not None)

    def _is_bound(self) -> bool:
        states, versions, names, averages = self._bound
        if names != (wanted := self.states_by_group()):
            for i, ((old, _), (new, _)) in enumerate(zip(names, wanted, strict=False)):
                if old != new and any(self.state.get(p) for p in self.param_groups[i]["params"]):
                    raise ValueError(changed_too_late(f"state_dtype of group {i}", old, new))
            return False
        if averages != (self.ema_decay is not None):
            return False
        if versions.hold(self.state):
            return True
        if not _core.C.holds(self.state, states):
            return False
        # The same objects, assigned again; or Python does not count.
        self._bound = (states, _core.C.DictVersions(self.state), names, averages)
        return True

    def _bind_states(self) -> None:
        """After a load, a copy, an edit or new rows: the table takes over ``self.state``."""
        for name, column in self._columns().items():
            saved = []
            for row, param in enumerate(self._row_params):
                number = self._saved_number(self.state.get(param, {}), row, name)
                number = torch.as_tensor(number, dtype=torch.float32, device=column.device)
                saved.append(number.reshape(()))
            if saved:
                column.copy_(torch.stack(saved))
        for row, param in enumerate(self._row_params):
            state, keys = self.state.get(param, {}), self._keys_of(row)
            known = any(key in state or (row, key) in self._pinned_states for key in keys)
            if "step" in state or known:
                self._init_state(row)
            else:
                self._known_table().set_states(row, None)  # made at the row's next gradient
        self._remember_bindings()
        self._states_bound = True
