"""A state of a parameter's shape in the dicts of an optimizer's ``state``, in its storage type."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from ampfuse import _core
from ampfuse._schema import ALGORITHMS, STORAGES, Storage
from ampfuse.optim.shards import local

FP32 = STORAGES["fp32"]
_CODED = [storage for storage in STORAGES.values() if storage.block]


def storage_for(wanted: str, param: Tensor) -> Storage:
    """What a state of `param` is stored in where `wanted` was asked for."""
    storage = STORAGES[wanted]
    return FP32 if param.numel() < storage.min_elements else storage


@dataclasses.dataclass(frozen=True)
class Stored:
    """A state of an algorithm, by its place in the kernel's order.

    It is one tensor under its name; in codes it is uint8 of the parameter's shape under the name
    and the type's suffix (``<name>_codes``), so that nobody who looks for the name takes codes for
    values, and ``<name>_scale``.
    """

    algorithm: str
    place: int
    name: str

    @classmethod
    def of(cls, algorithm: str, names: tuple[str, ...]) -> tuple[Stored, ...]:
        """The states of `algorithm` that are called so."""
        states = ALGORITHMS[algorithm].states
        return tuple(cls(algorithm, states.index(name), name) for name in names)

    @property
    def keys(self) -> tuple[str, ...]:
        """All that it may stand under, what is of the parameter's shape first."""
        keys = [of.keys(self.name) for of in STORAGES.values()]
        return tuple(dict.fromkeys([*(first for first, *_ in keys), *itertools.chain(*keys)]))

    def shapes(self, param: Tensor, storage: Storage) -> dict[str, tuple[int, ...]]:
        """Of what it stands under for `param`."""
        first, *scale = storage.keys(self.name)
        blocks = (storage.scales(local(param).numel()),)
        return {first: tuple(param.shape), **dict.fromkeys(scale, blocks)}

    def storage_in(self, state: dict[str, Any], likely: Storage = FP32) -> Storage | None:
        """How `state` has it; None if not. Scales alone, whose name is the same, are `likely`'s."""
        found = {of: state.keys() & {*of.keys(self.name)} for of in _CODED}
        if any(found.values()):
            return max(_CODED, key=lambda of: (len(found[of]), of is likely))
        value = state.get(self.name)
        if value is None:
            return None
        return next(
            (of for of in STORAGES.values() if getattr(value, "dtype", None) is dtype_of(of)), FP32
        )

    def values(self, state: dict[str, Any]) -> Tensor:
        """Its values, float32."""
        storage = self.storage_in(state)
        assert storage is not None
        lists = [state[key] for key in storage.keys(self.name)]
        if not storage.block:
            return lists[0].to(torch.float32)
        values = _core.C.empty_laid_out_as(lists[0])
        _core.C.decode_state(self.algorithm, self.place, storage.name, lists, values)
        return values

    def fit(self, state: dict[str, Any], param: Tensor, storage: Storage, fill: float) -> None:
        """Have it in `storage` in `state`, laid out as `param`; full of `fill` if it was not."""
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
        """Have `values` (float32, in the parameter's layout) in `state`, rounded to nearest."""
        lists = self._make(state, values, storage)
        if storage.block:
            _core.C.encode_state(self.algorithm, self.place, values, storage.name, lists)
        else:
            lists[0].copy_(values)

    def _make(self, state: dict[str, Any], like: Tensor, storage: Storage) -> list[Tensor]:
        """What it stands under, in place of what there was; with no values yet."""
        for key in self.keys:
            state.pop(key, None)
        first, *scale = storage.keys(self.name)
        made = {first: _core.C.empty_laid_out_as(like, dtype_of(storage))}
        for key in scale:
            blocks = storage.scales(like.numel())
            made[key] = torch.empty(blocks, dtype=torch.float32, device=like.device)
        state.update(made)
        return list(made.values())


def dtype_of(storage: Storage) -> torch.dtype:
    """Of the tensor that has a state's elements."""
    return {32: torch.float32, 16: torch.bfloat16, 8: torch.uint8}[storage.bits]
