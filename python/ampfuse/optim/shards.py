"""Parameters that are spread over processes (torch's DTensor): shards, and what ranks decide.

Kernels work on the local shard of a parameter, and states are DTensors placed as it is. Whether a
step is skipped, the norm that clips it and the norms of rows are of all shards together: of each
inspection every rank gathers what all have found, in one collective, and adds it in the order of
ranks. So all decide alike, and nobody waits for the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from ampfuse._C import ParamTable


def local(tensor: Tensor) -> Tensor:
    """What a DTensor holds in this process; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "_local_tensor")


def placed_as(param: Tensor, shard: Tensor) -> Tensor:
    """The DTensor whose local tensor is `shard`, in the shape and places of `param`.

    `shard` itself where `param` is no DTensor, or the shapes differ, as of scales of codes.
    """
    if not is_sharded(param) or shard.shape != local(param).shape:
        return shard
    from torch.distributed.tensor import DTensor

    like: Any = param
    return DTensor.from_local(
        shard,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def origin(param: Any) -> int:
    """Where the shard of a DTensor begins among its elements, counted row by row."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as place_of

    _, offset = place_of(param.shape, param.device_mesh, param.placements)
    return sum(map(operator.mul, offset, param.stride())) if local(param).numel() else 0


def redistributed(gradient: Any, param: Any) -> Tensor:
    """A gradient as DTensor in the places of its parameter: a partial sum becomes the sum."""
    with torch.no_grad():
        return gradient.redistribute(param.device_mesh, param.placements)


@contextlib.contextmanager
def on_shards(state: dict[str, Any], param: Tensor) -> Iterator[dict[str, Any]]:
    """`state` of `param` with local shards for DTensors; what changes there is written back."""
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
        group: to which each hands what it found.
        counted_elsewhere: rows of which another rank has the same shard, and adds the norm: bool,
            [rows], on the device. None where there are none.
    """

    group: ProcessGroup
    counted_elsewhere: Tensor | None

    @classmethod
    def of(cls, params: list[Tensor]) -> Ranks | None:
        """None where every parameter is whole, or there is one process.

        Raises ValueError if the meshes of the parameters do not lie within one of them.
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
                    f"{largest}, which does not have all its ranks. Use an optimizer for each."
                )
        elsewhere = [not _is_first_replica(param, min(ranks)) for param in params]
        device = local(params[0]).device
        counted = torch.tensor(elsewhere, device=device) if any(elsewhere) else None
        return cls(group_of(largest), counted)

    def join(self, table: ParamTable) -> None:
        """From now on the steps of `table` are decided together."""

        def gather(mine: Tensor) -> Tensor:
            everyone = mine.new_empty(self.group.size() * mine.numel())
            torch.distributed.all_gather_into_tensor(everyone, mine, self.group)
            return everyone

        table.inspector.set_gather(gather, self.counted_elsewhere)

    def share(self, flag: Tensor) -> None:
        """Make `flag` (float32) the largest of all ranks'."""
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, self.group)


def _is_first_replica(param: Any, first_rank: int) -> bool:
    """Whether this process is the first of those that hold the same shard of `param`."""
    if not is_sharded(param):
        return torch.distributed.get_rank() == first_rank
    # Of meshes side by side, as those of one dimension of a larger mesh, the first one counts.
    at = zip(param.placements, param.device_mesh.get_coordinate() or (), strict=False)
    is_first = not any(place.is_replicate() and coordinate for place, coordinate in at)
    return first_rank in param.device_mesh.mesh and is_first


def group_of(mesh: DeviceMesh) -> ProcessGroup:
    """The processes of a mesh, of any number of dimensions."""
    if mesh.size() == torch.distributed.get_world_size():
        return torch.distributed.group.WORLD  # type: ignore[return-value]
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()
