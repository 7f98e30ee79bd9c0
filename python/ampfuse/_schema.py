"""The extension's schema: algorithms with their states and hyper-parameters, and storage types.

Each is described once, in csrc/core. State keys, checkpoints, memory reports, checks and messages
are derived from it.
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
    """A storage type of states, which ``state_dtype`` selects.

    Attributes:
        bits: of an element.
        rounds_at_random: stochastically, instead of to nearest.
        suffix: of the key of quantized values, ``<name><suffix>``, next to the float32 scales under
            ``<name>_scale``; None for a type that is not quantized.
        block: the number of elements, adjacent in memory, that share a scale; 0 without scales.
        min_elements: smaller parameters keep float32 states.
    """

    name: str
    bits: int
    rounds_at_random: bool
    suffix: str | None
    block: int
    min_elements: int

    def keys(self, state: str) -> tuple[str, ...]:
        """The keys of a state of that name, the tensor of the parameter's shape first."""
        return (state,) if self.suffix is None else (state + self.suffix, f"{state}_scale")

    def scales(self, elements: int) -> int:
        """The number of scales of `elements` elements."""
        return -(-elements // self.block) if self.block else 0

    def nbytes(self, elements: int) -> int:
        """The bytes of `elements` elements, scales included."""
        return elements * self.bits // 8 + 4 * self.scales(elements)


@dataclass(frozen=True)
class Hyper:
    """A hyper-parameter: its `name` in the kernels, and its place in a parameter group.

    Attributes:
        key: in a group; None if groups do not have it.
        index: in the group's value, where that is a pair.
        initial: the value where a group does not have the key.
        off: the value of the group that leaves a flag off.
    """

    name: str
    key: str | None
    index: int | None
    initial: float
    is_flag: bool
    off: float

    def of(self, group: Mapping[str, Any]) -> Any:
        """The value passed to the kernels. A learning rate that is a tensor is passed through."""
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
        last_state_if: a key of groups; where its value is 0 or False, the last state is left out.
        filled_with: the constructor's argument that new states are filled with.
        storages: names of the storage types that its states may have.
        uses_count: whether a step needs the step count.
        numbers: names of the numbers that it keeps of each parameter, in addition to `states`.
        follows_norms: whether it scales the step of each tensor by norms.
        has_scratch: whether its step has two stages, between which Python works on scratch memory.
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
        """Whether the last state starts as the first gradient, and is missing before it."""
        return self.last_state_if is not None and not self.uses_count

    def states_in(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The states that a parameter of `group` has."""
        switch = self.last_state_if
        return self.states if switch is None or group.get(switch) else self.states[:-1]


def _algorithm(name: str, described: dict[str, Any]) -> Algorithm:
    return Algorithm(
        name,
        tuple(described["states"]),
        described["last_state_if"],
        described["filled_with"],
        tuple(described["storages"]),
        tuple(Hyper(**hyper) for hyper in described["hypers"]),
        described["uses_count"],
        ("step", "exp_avg_norm") if described["grad_norms"] else ("step",),
        described["follows_norms"],
        described["has_scratch"],
    )


_described = _core.C.schema()
STORAGES = {name: Storage(name, **of) for name, of in _described["storages"].items()}
ALGORITHMS = {name: _algorithm(name, of) for name, of in _described["algorithms"].items()}
# Hyper-parameters that a step can read on the device.
READ_ON_DEVICE = tuple(_described["read_on_device"])
# The counts of a metered step for each row, in order; the gradient's exponents follow them.
METER_COUNTS: tuple[str, ...] = tuple(_described["meter_counts"])
# The factor that a metered step's norms of updates contain.
UPDATE_FACTOR: float = _described["update_factor"]
