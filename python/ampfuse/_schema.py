"""What the extension says of itself: algorithms, their states and hyper-parameters, storage types.

Each is described once, in csrc/core. State keys, checkpoints, memory reports, checks and messages
follow from here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ampfuse import _core


@dataclass(frozen=True)
class Storage:
    """A storage type of states: what ``state_dtype`` names.

    Attributes:
        bits: of an element.
        rounds_at_random: stochastically, or to nearest.
        suffix: a state in codes has them under its name and this, and float32 scales under
            ``<name>_scale``; None for a type without codes.
        block: elements that share a scale, as they lie in memory; 0: there are no scales.
        min_elements: smaller parameters keep float32 states.
    """

    name: str
    bits: int
    rounds_at_random: bool
    suffix: str | None
    block: int
    min_elements: int

    def keys(self, state: str) -> tuple[str, ...]:
        """What a state of that name stands under, the tensor of the parameter's shape first."""
        return (state,) if self.suffix is None else (state + self.suffix, f"{state}_scale")

    def scales(self, elements: int) -> int:
        """How many scales so many elements have."""
        return -(-elements // self.block) if self.block else 0

    def nbytes(self, elements: int) -> int:
        """What so many elements take, with their scales."""
        return elements * self.bits // 8 + 4 * self.scales(elements)


@dataclass(frozen=True)
class Hyper:
    """A hyper-parameter: its `name` in the kernels, and what it is in a parameter group.

    Attributes:
        key: of a group; None: no group has it.
        index: of the group's value, where that is a pair.
        initial: where a group does not have it.
        off: of a flag: it is set where the group has another value.
    """

    name: str
    key: str | None
    index: int | None
    initial: float
    is_flag: bool
    off: float

    def of(self, group: Mapping[str, Any]) -> Any:
        """What kernels are told. A rate that is a tensor stays one."""
        if self.key is None or self.key not in group:
            return float(self.initial != self.off) if self.is_flag else self.initial
        value = group[self.key]
        if self.index is not None:
            value = value[self.index]
        if self.is_flag:
            return float((value or 0) != self.off)  # None is False to torch
        return value if isinstance(value, Tensor) and self.name == "lr" else float(value)


@dataclass(frozen=True)
class Algorithm:
    """An optimizer's kernel.

    Attributes:
        states: names of the states of a parameter's shape, in the kernel's order.
        last_state_if: of a group; there is no last state where this is 0 or False.
        filled_with: the argument of the constructor that fresh states are filled with.
        storages: names of the storage types that its states may have.
        uses_count: whether a step needs its number.
        numbers: names of the numbers that it keeps of each parameter, in addition to `states`.
        follows_norms: of tensors, by itself.
        has_scratch: its step has two stages, between which Python works on the memory that one
            leaves to the other.
    """

    name: str
    states: tuple[str, ...]
    last_state_if: str | None
    filled_with: str | None
    storages: tuple[str, ...]
    hypers: tuple[Hyper, ...]
    uses_count: bool
    numbers: tuple[str, ...]
    follows_norms: bool
    has_scratch: bool

    @functools.cached_property
    def keys(self) -> list[str]:
        """The keys of a parameter group that a step reads."""
        keys = [*(hyper.key for hyper in self.hypers), self.last_state_if, "state_dtype"]
        return [key for key in dict.fromkeys(keys) if key is not None]

    @property
    def starts_at_gradient(self) -> bool:
        """A state that is not there says which step is the first: it then becomes the gradient."""
        return self.last_state_if is not None and not self.uses_count

    def states_in(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The states that a parameter of `group` has."""
        switch = self.last_state_if
        return self.states if switch is None or group.get(switch) else self.states[:-1]


def _algorithm(name: str, found: dict[str, Any]) -> Algorithm:
    return Algorithm(
        name,
        tuple(found["states"]),
        found["last_state_if"],
        found["filled_with"],
        tuple(found["storages"]),
        tuple(Hyper(**hyper) for hyper in found["hypers"]),
        found["uses_count"],
        ("step", "exp_avg_norm") if found["grad_norms"] else ("step",),
        found["follows_norms"],
        found["has_scratch"],
    )


_found = _core.C.schema()
STORAGES = {name: Storage(name, **of) for name, of in _found["storages"].items()}
ALGORITHMS = {name: _algorithm(name, of) for name, of in _found["algorithms"].items()}
# Hyper-parameters that a step can read on the device.
READ_ON_DEVICE = tuple(_found["read_on_device"])
# What a metered step counts of each row, in order; after these come the gradient's exponents.
METER_COUNTS: tuple[str, ...] = tuple(_found["meter_counts"])
# What a metered step's norms of updates are times.
UPDATE_FACTOR: float = _found["update_factor"]
