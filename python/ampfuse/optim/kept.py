"""How a state of a parameter's shape is kept: in FP32, in BF16, or in codes of 8 bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ampfuse import _core
from ampfuse.optim.options import StateMode
from ampfuse.optim.shards import local

# By algorithm: the states of the parameter's shape, in the kernel's order.
STATES = {name: tuple(states) for name, states in _core.C.algorithms().items()}
# Whose states may be codes.
PACKABLE = frozenset(_core.C.packable_algorithms())

# Parameters of fewer elements keep FP32 states: they are no memory, and often biases and norms,
# whose neighbours differ in size (Dettmers et al., arXiv:2110.02861).
MIN_8BIT_SIZE = 4096

_DTYPES: dict[torch.dtype, StateMode] = {torch.bfloat16: "bf16"}


def mode_for(wanted: StateMode, param: Tensor) -> StateMode:
    """What a state of `param` is kept as where `wanted` was asked for."""
    return "fp32" if wanted == "8bit" and param.numel() < MIN_8BIT_SIZE else wanted


@dataclasses.dataclass(frozen=True)
class Kept:
    """A state of an algorithm, by its place, in the dicts of an optimizer's ``state``.

    In FP32 and BF16 it is one tensor under its name. In 8 bits it is ``<name>_codes``, uint8 of
    the parameter's shape, and ``<name>_scale``, float32, one for each block of 128 elements as they
    lie in memory; nobody who looks for the name takes codes for values.
    """

    algorithm: str
    place: int
    name: str

    @classmethod
    def of(cls, algorithm: str, names: tuple[str, ...]) -> tuple[Kept, ...]:
        return tuple(cls(algorithm, STATES[algorithm].index(name), name) for name in names)

    @property
    def keys(self) -> tuple[str, str, str]:
        """All that it may stand under."""
        return self.name, f"{self.name}_codes", f"{self.name}_scale"

    def keys_in(self, mode: StateMode) -> tuple[str, ...]:
        """What it stands under in `mode`, the tensor of the parameter's shape first."""
        return self.keys[1:] if mode == "8bit" else self.keys[:1]

    def shapes(self, param: Tensor) -> dict[str, tuple[int, ...]]:
        """What may stand under `keys` for `param`."""
        shape, blocks = tuple(param.shape), -(-local(param).numel() // _core.C.block)
        return dict(zip(self.keys, (shape, shape, (blocks,)), strict=True))

    def mode_in(self, state: dict[str, Any]) -> StateMode | None:
        """How `state` has it; None if not."""
        if not state.keys().isdisjoint(self.keys[1:]):
            return "8bit"
        value = state.get(self.name)
        return None if value is None else _DTYPES.get(value.dtype, "fp32")

    def values(self, state: dict[str, Any]) -> Tensor:
        """Its values, float32."""
        if self.mode_in(state) != "8bit":
            return state[self.name].to(torch.float32)
        codes, scale = (state[key] for key in self.keys[1:])
        values = _core.C.empty_laid_out_as(codes)
        _core.C.decode_state(self.algorithm, self.place, codes, scale, values)
        return values

    def put(self, state: dict[str, Any], values: Tensor, mode: StateMode) -> None:
        """Keep `values` (float32, in the parameter's layout) in `state`, rounded to nearest."""
        kept = self._make(state, values, mode)
        if mode == "8bit":
            _core.C.encode_state(self.algorithm, self.place, values, *kept)
        else:
            kept[0].copy_(values)

    def put_zeros(self, state: dict[str, Any], like: Tensor, mode: StateMode) -> None:
        """Keep zeros, laid out as `like`."""
        for tensor in self._make(state, like, mode):
            tensor.zero_()

    def _make(self, state: dict[str, Any], like: Tensor, mode: StateMode) -> list[Tensor]:
        """What it stands under in `mode`, in place of what there was; with no values yet."""
        for key in self.keys:
            state.pop(key, None)
        if mode == "8bit":
            blocks = self.shapes(like)[self.keys[2]]
            scale = torch.empty(blocks, dtype=torch.float32, device=like.device)
            made = [_core.C.empty_laid_out_as(like, torch.uint8), scale]
        else:
            dtype = torch.float32 if mode == "fp32" else torch.bfloat16
            made = [_core.C.empty_laid_out_as(like, dtype)]
        state.update(zip(self.keys_in(mode), made, strict=True))
        return made
