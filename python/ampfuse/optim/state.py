"""The state of fused optimizers: its storage, and its tensors in the table."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ampfuse import _core
from ampfuse._schema import STORAGES, Algorithm, Storage
from ampfuse.optim.masters import MASTERS, exact_float32, has_begun
from ampfuse.optim.options import RULES, changed_too_late, check
from ampfuse.optim.param_groups import Component, parameters
from ampfuse.optim.sharding import local, on_shards

if TYPE_CHECKING:
    from ampfuse._C import ParamTable

FP32 = STORAGES["fp32"]


def storage_for(wanted: str, param: Tensor) -> Storage:
    """The storage type of a state of `param` where the type `wanted` was asked for."""
    storage = STORAGES[wanted]
    return FP32 if param.numel() < storage.min_elements else storage


@dataclasses.dataclass(frozen=True)
class StateSpec:
    """A state of an algorithm, by its place in the kernel's order, in any storage type.

    It is one tensor under its name. Quantized it is two: uint8 of the parameter's shape under the
    name and the type's suffix (``<name>_8bit``), so that code that looks for the name does not
    take quantized values for the state, and ``<name>_scale``.
    """

    algorithm: str
    place: int
    name: str

    @classmethod
    def of(cls, algorithm: Algorithm, group: dict[str, Any] | None = None) -> tuple[StateSpec, ...]:
        """The states of `algorithm`, or those that a parameter of `group` has."""
        names = algorithm.states if group is None else algorithm.states_in(group)
        return tuple(cls(algorithm.name, place, name) for place, name in enumerate(names))

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys that it may have, those of the parameter's shape first."""
        keys = [storage.keys(self.name) for storage in STORAGES.values()]
        return tuple(dict.fromkeys([*(first for first, *_ in keys), *itertools.chain(*keys)]))

    def shapes(self, param: Tensor, storage: Storage) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors for `param`, by key."""
        first, *scale = storage.keys(self.name)
        blocks = (storage.scales(local(param).numel()),)
        return {first: tuple(param.shape), **dict.fromkeys(scale, blocks)}

    def storage_in(self, state: dict[str, Any]) -> Storage | None:
        """Its storage type in `state`; None if missing."""
        for at in (0, 1):  # the scales alone say it if the values are missing
            for storage in STORAGES.values():
                if storage.block and storage.keys(self.name)[at] in state:
                    return storage
        if (value := state.get(self.name)) is None:
            return None
        dtype = getattr(value, "dtype", None)
        return next((each for each in STORAGES.values() if dtype_of(each) is dtype), FP32)

    def values(self, state: dict[str, Any]) -> Tensor:
        """Its values, as float32."""
        storage = self.storage_in(state)
        assert storage is not None
        tensors = [state[key] for key in storage.keys(self.name)]
        if not storage.block:
            return tensors[0].to(torch.float32)
        values = _core.C.empty_laid_out_as(tensors[0])
        _core.C.decode_state(self.algorithm, self.place, storage.name, tensors, values)
        return values

    def fit(self, state: dict[str, Any], param: Tensor, storage: Storage, fill: float) -> None:
        """Convert it in `state` to `storage` and the layout of `param`; a new one is `fill`."""
        there = self.storage_in(state)
        if there is None and fill == 0:
            for tensor in self._make(state, param, storage):
                tensor.zero_()
            return
        if there == storage:
            held = state[storage.keys(self.name)[0]]
            if held.stride() == param.stride() and held.dtype == dtype_of(storage):
                return
        values = _core.C.empty_laid_out_as(param).fill_(fill)
        if there is not None:
            values.copy_(self.values(state))
        self.put(state, values, storage)

    def put(self, state: dict[str, Any], values: Tensor, storage: Storage) -> None:
        """Store `values` (float32, in the parameter's layout) in `state`, rounded to nearest."""
        tensors = self._make(state, values, storage)
        if storage.block:
            _core.C.encode_state(self.algorithm, self.place, values, storage.name, tensors)
        else:
            tensors[0].copy_(values)

    def _make(self, state: dict[str, Any], like: Tensor, storage: Storage) -> list[Tensor]:
        """Replace its tensors in `state` by new ones, which have no values yet."""
        for key in self.keys:
            state.pop(key, None)
        first, *scale = storage.keys(self.name)
        made = {first: _core.C.empty_laid_out_as(like, dtype_of(storage))}
        for key in scale:
            made[key] = like.new_empty(storage.scales(like.numel()), dtype=torch.float32)
        state.update(made)
        return list(made.values())


def dtype_of(storage: Storage) -> torch.dtype:
    """The type of the tensor with a state's elements."""
    return {32: torch.float32, 16: torch.bfloat16, 8: torch.uint8}[storage.bits]


# The storage type of a group's states, and their names.
_Kept = tuple[str, tuple[str, ...]]


class StateOfParameters(defaultdict[Tensor, Any]):
    """``optimizer.state`` of a fused optimizer; torch.distributed.checkpoint finds it complete.

    ``_init_optim_state`` in torch.distributed.checkpoint.state_dict evaluates ``bool(state)``
    before an optimizer is read or states are loaded into it. If it were False, that function would
    make a step with gradients of zero. So all states are made for that caller, and for no other.
    """

    states: States | None = None

    def __bool__(self) -> bool:
        if sys._getframe(1).f_code.co_name == "_init_optim_state" and self.states is not None:
            return self.states.make_all() or len(self) > 0
        return len(self) > 0

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,), None, None, iter(self.items())


class States(Component):
    """Binds the tensors of ``optimizer.state`` to the table of an optimizer.

    Attributes:
        are_bound: whether the table has the tensors that were in ``state`` at the last look.
        are_shown: whether all states were asked for, with their step counts.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.algorithm = optimizer.algorithm
        self.are_bound = self.are_shown = False
        # At the last look: what each group keeps, and whether there were averages.
        self._by_group: list[_Kept] = []
        self._has_averages = False
        # For an algorithm whose states start at a gradient: the states in the table, with their
        # step counts.
        self._started: list[tuple[dict[str, Any], Tensor]] = []
        # For each row the tensors, by their keys in the state, that a captured graph works on.
        self._pinned: dict[int, dict[str, Tensor]] = {}

    @property
    def _table(self) -> ParamTable:
        return self.optimizer._rows.existing_table()

    def storage_of(self, group: dict[str, Any]) -> str:
        """The name of the storage type that `group` asks for. Raises ValueError for a wrong one."""
        optimizer = self.optimizer
        name: str = group.get("state_dtype") or optimizer.state_dtype
        check("state_dtype", name, RULES["state_dtype"])
        algorithm = optimizer.algorithm_in(group)
        if name not in algorithm.storages:
            storages = " or ".join(map(repr, algorithm.storages))
            raise ValueError(
                f"{type(optimizer).__name__} does not support state_dtype={name!r} (states in "
                f"{STORAGES[name].bits} bits); use {storages}"
            )
        return name

    def wanted(self) -> list[_Kept]:
        """The storage type and the names of states that each group asks for."""
        return list(map(self._wanted, self.optimizer.param_groups))

    def _wanted(self, group: dict[str, Any]) -> _Kept:
        return self.storage_of(group), self.optimizer.algorithm_in(group).states_in(group)

    def follow_group(self, i: int, group: dict[str, Any]) -> None:
        """Note whether a group that was changed asks for other states now.

        Raises ValueError if it has states that are stored in another type.
        """
        if self._has_averages != (self.optimizer.ema_decay is not None):
            self.are_bound = False
        wanted = self._wanted(group)
        if i >= len(self._by_group) or wanted == self._by_group[i]:
            return
        was, now = self._by_group[i][0], wanted[0]
        if was != now and any(self.optimizer.state.get(p) for p in group["params"]):
            raise ValueError(changed_too_late(f"state_dtype of group {i}", was, now))
        self.are_bound = False

    def release(self) -> None:
        """Let go of all states: others are about to take their place."""
        self.are_bound, self._started = False, []
        if self.optimizer._rows.table is not None:
            for row in range(len(self.optimizer._rows.params)):
                self._table.set_states(row, None)

    def forget(self) -> None:
        """Unbind all states, as there are new rows; captured graphs belong to the old ones."""
        self._pinned, self.are_bound = {}, False

    # --- binding --------------------------------------------------------------------------------

    def bind(self) -> None:
        """Bind ``state`` to the table, after a load, a copy, an edit or new rows."""
        self.discard_uninitialized()
        self._started = []
        optimizer, params = self.optimizer, self.optimizer._rows.params
        groups, self._by_group = optimizer._rows.groups(), self.wanted()
        self._has_averages = optimizer.ema_decay is not None
        for name, column in self._columns().items():
            saved = []
            for group, param in zip(groups, params, strict=True):
                number = self._saved_number(optimizer.state.get(param, {}), group, name)
                number = torch.as_tensor(number, dtype=torch.float32, device=column.device)
                saved.append(number.reshape(()))
            column.copy_(torch.stack(saved))
        begun = []
        for row, param in enumerate(params):
            if has_begun(optimizer.state.get(param, {})) or row in self._pinned:
                begun.append(row)
            else:
                self._table.set_states(row, None)  # made at the row's next gradient
        self.init_rows(begun)

    @torch.no_grad()
    def make_all(self) -> bool:
        """Make the states that the first gradients would make, with step counts of 0.

        Returns whether there are any: parameters, whose step is the fused one.
        """
        optimizer = self.optimizer
        is_ours = optimizer is not None and not optimizer._has_own_step
        if not is_ours or next(parameters(optimizer), None) is None:
            return False
        optimizer._check_not_swapped("reading all states")
        if not self.are_shown:
            self.discard_uninitialized()
            self.are_bound, self.are_shown = False, True
        optimizer.ensure_bound()
        rows = enumerate(optimizer._rows.params)
        states = optimizer.state
        self.init_rows(
            row for row, p in rows if p.requires_grad and not has_begun(states.get(p, {}))
        )
        optimizer._begin_dcp_read()
        return True

    def init_rows(self, rows: Iterable[int]) -> None:
        """Bind the states of `rows`, with zeros where there are none: the table has all then.

        Counts are views of a column.
        """
        optimizer, groups = self.optimizer, self.optimizer._rows.groups()
        for row in rows:
            param, group = optimizer._rows.params[row], groups[row]
            with on_shards(optimizer.state[param], param) as state:
                self._bind_row(row, group, state)
            self._bind_numbers(row, group, optimizer.state[param])
        self._table.remember(states=optimizer.state)
        self.are_bound = True

    def _bind_row(self, row: int, group: dict[str, Any], state: dict[str, Any]) -> None:
        table, param = self._table, self._table.param(row)
        storage = storage_for(self.storage_of(group), self.optimizer._rows.params[row])
        filler = self.algorithm.filled_with
        fill = float(self.optimizer.defaults[filler]) if filler else 0.0
        states = []
        for stored in StateSpec.of(self.optimizer.algorithm_in(group), group):
            held = [value for key in stored.keys if (value := state.get(key)) is not None]
            if held and held[0].shape != param.shape:
                raise ValueError(
                    f"{stored.name} of {table.name(row)} must have the parameter's shape "
                    f"{tuple(param.shape)}, got {tuple(held[0].shape)}. Delete the state to start "
                    "again."
                )
            stored.fit(state, param, storage, fill)
            keys = storage.keys(stored.name)
            self._use_pinned(row, state, keys)
            states.append([state[key] for key in keys])
        table.set_states(row, states, storage.name, self._average(row, state))

    def _average(self, row: int, state: dict[str, Any]) -> Tensor | None:
        """The moving average of a row, which starts at the parameter's present value."""
        if self.optimizer.ema_decay is None:  # a loaded one would be saved again, outdated
            state.pop("ema", None)
            return None
        if state.get("ema") is None:
            state["ema"] = exact_float32(self.optimizer._rows.master_of(row))
        self._use_pinned(row, state, ("ema",))
        return state["ema"]

    # --- numbers --------------------------------------------------------------------------------

    def _columns(self) -> dict[str, Tensor]:
        """States that are one number per parameter, by name: float32 columns of the table."""
        columns = (self._table.steps, self._table.norm_averages)
        return {name: of() for name, of in zip(self.algorithm.numbers, columns, strict=False)}

    # torch's SGD keeps no step count: a buffer that exists has been started. Here one may exist
    # though its first step was skipped, so the table counts. The count is in the state if random
    # bits depend on it, or if all states were asked for.

    def _bind_numbers(self, row: int, group: dict[str, Any], state: dict[str, Any]) -> None:
        columns = self._columns()
        if self.algorithm.starts_at_gradient:
            if self._start.storage_in(state) is not None:
                self._started.append((state, columns["step"][row]))
            storage = STORAGES[self.storage_of(group)]
            is_random = self.optimizer.rounding == "stochastic" or storage.rounds_at_random
            if not (is_random or self.are_shown):
                state.pop("step", None)
                return
        for name, column in columns.items():
            state[name] = column[row]

    def _saved_number(self, state: dict[str, Any], group: dict[str, Any], name: str) -> Any:
        """The number in a state that was loaded or copied, or that of a fresh one."""
        if not self.algorithm.starts_at_gradient:
            return state.get(name, self.optimizer._first_step if name == "step" else 0)
        has_start = self._start.storage_in(state) is not None
        starts = self.algorithm.states_in(group) and not has_start
        return 0 if starts else state.get("step", int(has_start))

    @property
    def _start(self) -> StateSpec:
        """The state whose first value is the first gradient."""
        return StateSpec.of(self.algorithm)[-1]

    def discard_uninitialized(self) -> None:
        """Write None for states whose first step was skipped, as torch has them."""
        if not self._started or self.are_shown:
            return
        start, counts = self._start, torch.stack([count for _, count in self._started]).tolist()
        for (state, _), count in zip(self._started, counts, strict=True):
            if count == 0 and start.storage_in(state) is not None:
                for key in start.keys:
                    state.pop(key, None)
                state[start.name] = None
                self.are_bound = False

    # --- states that keep their memory ----------------------------------------------------------

    def pin(self) -> None:
        """From now on states keep their memory, since a captured graph holds its addresses.

        Loaded or assigned tensors are copied into it.
        """
        for row, param in enumerate(self.optimizer._rows.params):
            state = self.optimizer.state.get(param, {})
            self._pinned[row] = {
                key: local(state[key])
                for key in state.keys() - {*MASTERS, *self.algorithm.numbers}
                if isinstance(state[key], Tensor)
            }

    def _use_pinned(self, row: int, state: dict[str, Any], keys: Iterable[str]) -> None:
        """Put the tensors of a captured graph back, with the values that the state has now."""
        for key in self._pinned.get(row, {}).keys() & keys:
            pinned = self._pinned[row][key]
            if pinned is not state[key]:
                pinned.copy_(state[key])
                state[key] = pinned
