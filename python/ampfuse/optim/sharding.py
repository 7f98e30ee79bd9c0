"""Parameters that are sharded over processes (torch's DTensor).

Kernels work on the local shard of a parameter, and states are DTensors with its placements. The
skip decision, the norm for clipping and the norms of rows are of all shards together: after each
inspection every rank gathers the findings of all ranks, in one collective, and adds them in the
order of ranks. So all ranks decide alike, and no host waits for its device.

:class:`Gathered` brings whole tensors to single ranks, for rules that need whole matrices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ampfuse._C import ParamTable


def local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "_local_tensor")


def placed_as(param: Any, shard: Tensor) -> Tensor:
    """The DTensor whose local tensor is `shard`, with the shape and placements of `param`.

    `shard` itself if `param` is not a DTensor, or the shapes differ, as those of scales do.
    """
    if not is_sharded(param) or shard.shape != local(param).shape:
        return shard
    from torch.distributed.tensor import DTensor

    whole = {"shape": param.shape, "stride": param.stride()}
    return DTensor.from_local(shard, param.device_mesh, param.placements, run_check=False, **whole)


def origin(param: Any) -> int:
    """The index of the first element of a DTensor's shard, counted row by row."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place_of

    _, offset = place_of(param.shape, param.device_mesh, param.placements)
    return sum(map(operator.mul, offset, param.stride())) if local(param).numel() else 0


def redistributed(gradient: Any, param: Any) -> Tensor:
    """A gradient with the placements of its parameter: a partial sum becomes the sum."""
    with torch.no_grad():
        return gradient.redistribute(param.device_mesh, param.placements)


@contextlib.contextmanager
def on_shards(state: dict[str, Any], param: Tensor) -> Iterator[dict[str, Any]]:
    """`state` of `param` with local shards for DTensors; changes are written back."""
    if not is_sharded(param):
        yield state
        return
    shards = {key: local(value) for key, value in state.items()}
    yield shards
    for key in state.keys() - shards.keys():
        del state[key]
    for key, shard in shards.items():
        if key not in state or local(state[key]) is not shard:
            state[key] = placed_as(param, shard)


@dataclasses.dataclass
class Ranks:
    """The processes that step the same parameters together.

    Attributes:
        group: the processes, which exchange what they find.
        counted_elsewhere: rows whose norm another rank adds, as it has the same shard: bool,
            [rows], on the device. None if there are none.
    """

    group: ProcessGroup
    counted_elsewhere: Tensor | None

    @classmethod
    def of(cls, params: list[Tensor]) -> Ranks | None:
        """The ranks of `params`; None if none is sharded, or there is one process.

        Raises ValueError unless the largest of the meshes contains all others.
        """
        meshes: list[DeviceMesh | None] = [getattr(param, "device_mesh", None) for param in params]
        largest = max((mesh for mesh in meshes if mesh), key=lambda mesh: mesh.size(), default=None)
        if largest is None or largest.size() == 1:
            return None
        ranks = set(largest.mesh.flatten().tolist())
        for param, mesh in zip(params, meshes, strict=True):
            if mesh is not None and not ranks.issuperset(mesh.mesh.flatten().tolist()):
                raise ValueError(
                    f"a parameter of shape {tuple(param.shape)} is on {mesh} and another on "
                    f"{largest}, which does not contain all its ranks. Use an optimizer for each."
                )
        elsewhere = [not _is_first_replica(param, min(ranks)) for param in params]
        device = local(params[0]).device
        counted = torch.tensor(elsewhere, device=device) if any(elsewhere) else None
        return cls(group_of(largest), counted)

    def join(self, table: ParamTable) -> None:
        """Have the ranks decide the steps of `table` together from now on."""

        def gather(mine: Tensor) -> Tensor:
            everyone = mine.new_empty(self.group.size() * mine.numel())
            dist.all_gather_into_tensor(everyone, mine, self.group)
            return everyone

        table.inspector.set_gather(gather, self.counted_elsewhere)

    def share(self, flag: Tensor) -> None:
        """Set `flag` (float32) to the maximum over all ranks."""
        dist.all_reduce(flag, dist.ReduceOp.MAX, self.group)


def _is_first_replica(param: Any, first_rank: int) -> bool:
    """Whether this process is the first of those that hold the same shard of `param`."""
    if not is_sharded(param):
        return dist.get_rank() == first_rank
    # If several meshes are the rows of a larger mesh, the first one counts.
    at = zip(param.placements, param.device_mesh.get_coordinate() or (), strict=False)
    is_first = not any(place.is_replicate() and coordinate for place, coordinate in at)
    return first_rank in param.device_mesh.mesh and is_first


def group_of(mesh: DeviceMesh) -> ProcessGroup:
    """The processes of a mesh with any number of dimensions."""
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD  # type: ignore[return-value]
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


_Shape = tuple[int, ...]


class Gathered:
    """Local tensors of DTensors on one mesh; every rank gets some of the tensors whole.

    One collective brings them there and one back. They are distributed so that all ranks have
    about the same work. Every rank must pass the same tensors.

    Arguments:
        mesh: of the DTensors.
        like: by any key, the DTensors that give shapes and placements.
        shards: by the same keys (or more), the local tensors, of any type, laid out as those of
            `like`.
        costs: the work that each tensor is for the rank that has it whole.
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
        self._template = next(iter(shards.values()))
        me, self._ranks = dist.get_rank(self._group), range(self._group.size())
        self._shapes = {key: tuple(param.shape) for key, param in like.items()}
        self._pieces = {
            key: _pieces(mesh, self._shapes[key], tuple(param.placements))
            for key, param in like.items()
        }
        self._owned = self._shared_out(costs)
        self._mine = self._owned[me]
        self._begin(
            [
                [shards[key] for key in keys if self._pieces[key][me].is_first]
                for keys in self._owned
            ],
            [[self._pieces[key][r].shape for key in self._received_from(r)] for r in self._ranks],
        )

    def wait(self) -> dict[Any, Tensor]:
        """The tensors that this rank has, whole."""
        self._whole = {key: self._template.new_empty(self._shapes[key]) for key in self._mine}
        for rank, pieces in enumerate(self._end()):
            for key, piece in zip(self._received_from(rank), pieces, strict=True):
                self._whole[key][self._pieces[key][rank].block] = piece
        return self._whole

    def give_back(self) -> None:
        """Begin to send the whole tensors back to the local ones."""
        self._begin(
            [[self._whole[k][self._pieces[k][r].block] for k in self._mine] for r in self._ranks],
            [[tuple(self._shards[key].shape) for key in owned] for owned in self._owned],
        )

    def take_back(self) -> None:
        """Wait until the local tensors have the values of the whole ones."""
        for owned, pieces in zip(self._owned, self._end(), strict=True):
            for key, piece in zip(owned, pieces, strict=True):
                self._shards[key].copy_(piece)

    def _shared_out(self, costs: dict[Any, float]) -> list[list[Any]]:
        """The keys of each rank's tensors: the most expensive first, to the least loaded rank."""
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
        sent = torch.cat([self._template.new_empty(0), *flat])
        sizes = [sum(map(math.prod, of_rank)) for of_rank in shapes]
        self._expected, self._received = shapes, sent.new_empty(sum(sizes))
        # As bytes: not every backend supports half precision.
        self._work: Any = dist.all_to_all_single(
            self._received.view(torch.uint8),
            sent.view(torch.uint8),
            [size * sent.itemsize for size in sizes],
            [sum(tensor.nbytes for tensor in tensors) for tensors in out],
            self._group,
            async_op=True,
        )

    def _end(self) -> list[list[Tensor]]:
        """The tensors that came from each rank."""
        self._work.wait()
        sizes = [math.prod(shape) for shapes in self._expected for shape in shapes]
        tensors = iter(self._received.split(sizes))
        return [[next(tensors).view(shape) for shape in shapes] for shapes in self._expected]


class _Piece(NamedTuple):
    """A rank's part of a tensor: for each dimension a slice, or the indices."""

    block: tuple[Any, ...]
    shape: _Shape
    is_first: bool  # among the ranks that have it, so it is the one that sends it


@functools.lru_cache(maxsize=4096)
def _pieces(mesh: DeviceMesh, shape: _Shape, placements: tuple[Any, ...]) -> list[_Piece]:
    """The part of a DTensor that each rank has."""
    group = group_of(mesh)
    pieces = []
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
        sizes = tuple(index.numel() for index in indices)
        pieces.append(_Piece(_block(indices), sizes, not any(copies)))
    return pieces


def _block(indices: list[Tensor]) -> tuple[Any, ...]:
    """The index of a block: slices, or the indices if some dimension has gaps."""
    flat = [index.view(-1) for index in indices]
    ends = [(int(index[0]), int(index[-1]) + 1) if len(index) else (0, 0) for index in flat]
    if any(end - first != len(index) for (first, end), index in zip(ends, flat, strict=True)):
        return tuple(indices)  # of strided shards
    return tuple(slice(first, end) for first, end in ends)
