"""Tensors that are spread over processes, each brought whole to one of them, and back."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ampfuse.optim.shards import group_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# A block of a tensor: of each dimension a slice, or the indices.
_Block = tuple[Any, ...]


class Gathered:
    """Local tensors of DTensors on one mesh; every rank gets some of the tensors whole.

    One collective brings them there and one back. Which rank gets which follows from what each
    costs there, so that all have about the same to do. Every rank has to have the same tensors.

    Arguments:
        mesh: of the DTensors.
        like: the DTensors that say where the local tensors belong, by any key.
        shards: the local tensors, of any type and of the layouts of the DTensors' own.
        cost: what a tensor of a shape costs the rank that has it.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        like: dict[Any, Any],
        shards: dict[Any, Tensor],
        cost: Callable[[Any], float],
    ) -> None:
        self._group = group_of(mesh)
        self._shards, self._like = shards, next(iter(shards.values()))
        self._rank, self._size = dist.get_rank(self._group), self._group.size()
        self._shapes = {key: tuple(param.shape) for key, param in like.items()}
        places = {
            key: _places(mesh, self._shapes[key], tuple(param.placements))
            for key, param in like.items()
        }
        self._blocks = {key: [block for block, _ in of] for key, of in places.items()}
        # Of copies of a block the first is sent.
        self._sends = {key: [is_first for _, is_first in of] for key, of in places.items()}
        self._owned = self._shared_out({key: cost(key) for key in like})
        ranks = range(self._size)
        out = [self._joined([shards[k] for k in self._sent_to(rank)]) for rank in ranks]
        sizes = [sum(self._numel(k, r) for k in self._received_from(r)) for r in ranks]
        self._begin(out, sizes)

    def wait(self) -> dict[Any, Tensor]:
        """The tensors that this rank has, whole."""
        whole = {key: self._like.new_empty(self._shapes[key]) for key in self._owned[self._rank]}
        for rank, pieces in enumerate(self._end()):
            keys = self._received_from(rank)
            sizes = [self._numel(key, rank) for key in keys]
            for key, piece in zip(keys, pieces.split(sizes), strict=True):
                block = whole[key][self._blocks[key][rank]]
                whole[key][self._blocks[key][rank]] = piece.view(block.shape)
        self._whole = whole
        return whole

    def give_back(self) -> None:
        """Have the local tensors hold what the whole ones hold by now."""
        ranks, mine = range(self._size), self._owned[self._rank]
        out = [
            self._joined([self._whole[key][self._blocks[key][rank]] for key in mine])
            for rank in ranks
        ]
        sizes = [sum(self._shards[key].numel() for key in self._owned[rank]) for rank in ranks]
        self._begin(out, sizes)
        for rank, pieces in enumerate(self._end()):
            shards = [self._shards[key] for key in self._owned[rank]]
            for shard, piece in zip(shards, pieces.split([s.numel() for s in shards]), strict=True):
                shard.copy_(piece.view(shard.shape))

    def _shared_out(self, costs: dict[Any, float]) -> list[list[Any]]:
        """Of each rank the keys of its tensors: the dearest first, to who has least by then."""
        owned: list[list[Any]] = [[] for _ in range(self._size)]
        load = [0.0] * self._size
        for key in sorted(costs, key=lambda key: (-costs[key], key)):
            rank = load.index(min(load))
            owned[rank].append(key)
            load[rank] += costs[key]
        return owned

    def _sent_to(self, rank: int) -> list[Any]:
        return [key for key in self._owned[rank] if self._sends[key][self._rank]]

    def _received_from(self, rank: int) -> list[Any]:
        return [key for key in self._owned[self._rank] if self._sends[key][rank]]

    def _numel(self, key: Any, rank: int) -> int:
        sizes = zip(self._blocks[key][rank], self._shapes[key], strict=True)
        return math.prod(
            len(range(length)[at]) if isinstance(at, slice) else at.numel() for at, length in sizes
        )

    def _joined(self, tensors: list[Tensor]) -> Tensor:
        return torch.cat([self._like.new_empty(0), *(tensor.reshape(-1) for tensor in tensors)])

    def _begin(self, out: list[Tensor], sizes: list[int]) -> None:
        sent = self._joined(out)
        self._sizes, self._received = sizes, sent.new_empty(sum(sizes))
        # As bytes: not every backend knows half precision.
        self._work: Any = dist.all_to_all_single(
            self._received.view(torch.uint8),
            sent.view(torch.uint8),
            [size * sent.itemsize for size in sizes],
            [tensor.nbytes for tensor in out],
            self._group,
            async_op=True,
        )

    def _end(self) -> tuple[Tensor, ...]:
        self._work.wait()
        return self._received.split(self._sizes)


@functools.lru_cache(maxsize=4096)
def _places(
    mesh: DeviceMesh, shape: tuple[int, ...], placements: tuple[Any, ...]
) -> list[tuple[_Block, bool]]:
    """What each rank has of a DTensor, and whether it is the first that has it."""
    group = group_of(mesh)
    found = []
    for rank in range(group.size()):
        at = (mesh.mesh == dist.get_global_rank(group, rank)).nonzero()[0].tolist()
        copies = (place for p, place in zip(placements, at, strict=True) if p.is_replicate())
        found.append((_block(mesh.shape, shape, placements, at), not any(copies)))
    return found


def _block(
    mesh: tuple[int, ...], shape: tuple[int, ...], placements: tuple[Any, ...], at: list[int]
) -> _Block:
    """What the rank at a place of a mesh has."""
    ndim = len(shape)
    indices = [
        torch.arange(size).view([-1 if i == dim else 1 for i in range(ndim)])
        for dim, size in enumerate(shape)
    ]
    for placement, size, place in zip(placements, mesh, at, strict=True):
        if not placement.is_replicate():
            parts, _ = placement._split_tensor(
                indices[placement.dim], size, with_padding=False, contiguous=False
            )
            indices[placement.dim] = parts[place]
    slices = []
    for of in indices:
        first = int(of.view(-1)[0]) if of.numel() else 0
        slices.append(slice(first, first + of.numel()))
        if of.numel() and int(of.view(-1)[-1]) + 1 != slices[-1].stop:
            return tuple(indices)  # of strided shards
    return tuple(slices)
