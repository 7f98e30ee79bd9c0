"""Tensors that are spread over processes, each brought whole to one of them, and back."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ampfuse.optim.shards import group_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_Shape = tuple[int, ...]


class Gathered:
    """Local tensors of DTensors on one mesh; every rank gets some of the tensors whole.

    One collective brings them there and one back. Which rank gets which follows from what each
    costs there, so that all have about the same to do. Every rank has to have the same tensors.

    Arguments:
        mesh: of the DTensors.
        like: the DTensors that say where the local tensors belong, by any key.
        shards: the local tensors, of any type and of the layouts of the DTensors' own.
        costs: what each costs the rank that has it whole.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        like: dict[Any, Any],
        shards: dict[Any, Tensor],
        costs: dict[Any, float],
    ) -> None:
        self._group = group_of(mesh)
        self._shards = shards
        self._like = next(iter(shards.values()))
        me, self._ranks = dist.get_rank(self._group), range(self._group.size())
        self._shapes = {key: tuple(param.shape) for key, param in like.items()}
        self._pieces = {
            key: _pieces(mesh, self._shapes[key], tuple(param.placements))
            for key, param in like.items()
        }
        self._owned = self._shared_out(costs)
        self._mine = self._owned[me]
        self._begin(
            [[shards[key] for key in of if self._pieces[key][me].is_first] for of in self._owned],
            [[self._pieces[key][r].shape for key in self._received_from(r)] for r in self._ranks],
        )

    def wait(self) -> dict[Any, Tensor]:
        """The tensors that this rank has, whole."""
        self._whole = {key: self._like.new_empty(self._shapes[key]) for key in self._mine}
        for rank, found in enumerate(self._end()):
            for key, piece in zip(self._received_from(rank), found, strict=True):
                self._whole[key][self._pieces[key][rank].block] = piece
        return self._whole

    def give_back(self) -> None:
        """Begin to have the local tensors hold what the whole ones hold by now."""
        self._begin(
            [[self._whole[k][self._pieces[k][r].block] for k in self._mine] for r in self._ranks],
            [[tuple(self._shards[key].shape) for key in owned] for owned in self._owned],
        )

    def take_back(self) -> None:
        """... and wait for that."""
        for owned, found in zip(self._owned, self._end(), strict=True):
            for key, piece in zip(owned, found, strict=True):
                self._shards[key].copy_(piece)

    def _shared_out(self, costs: dict[Any, float]) -> list[list[Any]]:
        """Of each rank the keys of its tensors: the dearest first, to who has least by then."""
        owned: list[list[Any]] = [[] for _ in self._ranks]
        load = [0.0] * len(owned)
        for key in sorted(costs, key=lambda key: (-costs[key], key)):
            rank = load.index(min(load))
            owned[rank].append(key)
            load[rank] += costs[key]
        return owned

    def _received_from(self, rank: int) -> list[Any]:
        return [key for key in self._mine if self._pieces[key][rank].is_first]

    def _begin(self, out: list[list[Tensor]], shapes: list[list[_Shape]]) -> None:
        """Send each rank its tensors of `out`, and receive some of `shapes` from each."""
        flat = [tensor.reshape(-1) for tensors in out for tensor in tensors]
        sent = torch.cat([self._like.new_empty(0), *flat])
        sizes = [sum(map(math.prod, of)) for of in shapes]
        self._expected, self._received = shapes, sent.new_empty(sum(sizes))
        # As bytes: not every backend knows half precision.
        self._work: Any = dist.all_to_all_single(
            self._received.view(torch.uint8),
            sent.view(torch.uint8),
            [size * sent.itemsize for size in sizes],
            [sum(tensor.nbytes for tensor in tensors) for tensors in out],
            self._group,
            async_op=True,
        )

    def _end(self) -> list[list[Tensor]]:
        """What came from each rank."""
        self._work.wait()
        sizes = [math.prod(shape) for of in self._expected for shape in of]
        tensors = iter(self._received.split(sizes))
        return [[next(tensors).view(shape) for shape in of] for of in self._expected]


class _Piece(NamedTuple):
    """What a rank has of a tensor: of each dimension a slice, or the indices."""

    block: tuple[Any, ...]
    shape: _Shape
    is_first: bool  # of the ranks that have it: this one sends it


@functools.lru_cache(maxsize=4096)
def _pieces(mesh: DeviceMesh, shape: _Shape, placements: tuple[Any, ...]) -> list[_Piece]:
    """What each rank has of a DTensor."""
    group = group_of(mesh)
    found = []
    for rank in range(group.size()):
        at = (mesh.mesh == dist.get_global_rank(group, rank)).nonzero()[0].tolist()
        indices = [
            torch.arange(size).view([-1 if i == dim else 1 for i in range(len(shape))])
            for dim, size in enumerate(shape)
        ]
        for placement, size, place in zip(placements, mesh.shape, at, strict=True):
            if not placement.is_replicate():
                parts, _ = placement._split_tensor(
                    indices[placement.dim], size, with_padding=False, contiguous=False
                )
                indices[placement.dim] = parts[place]
        copies = (place for p, place in zip(placements, at, strict=True) if p.is_replicate())
        sizes = tuple(of.numel() for of in indices)
        found.append(_Piece(_block(indices), sizes, not any(copies)))
    return found


def _block(indices: list[Tensor]) -> tuple[Any, ...]:
    """What indexes a block: slices, or, where some dimension has gaps between, the indices."""
    flat = [of.view(-1) for of in indices]
    ends = [(int(of[0]), int(of[-1]) + 1) if len(of) else (0, 0) for of in flat]
    if any(end - first != len(of) for (first, end), of in zip(ends, flat, strict=True)):
        return tuple(indices)  # of strided shards
    return tuple(slice(first, end) for first, end in ends)
