"""How long the host is busy with a step of 2,000 sharded parameters (DTensor), against whole ones.

    python benchmarks/sharded_host.py [--quick]
    torchrun --nproc-per-node 2 benchmarks/sharded_host.py

AdamW with clipping under a GradScaler, as in FSDP2's loops: ampfuse's on shards and on as many
whole tensors; torch's fused AdamW on shards with its own GradScaler and clip_grad_norm_. Each rank
has one element of each parameter, so that next to nothing is left of the kernels but their calls.
Two variants as in ``host_time.py``: gradients that are the "same" tensors in each step, and "new"
ones. On several ranks, which begin together, the time includes their collectives.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from harness import measure, rows_of
from host_time import HostClock
from step import Results, options_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ampfuse

_MAX_NORM = 1.0


class Step:
    """Clips and steps `params`; before each call its gradients are new ones, if `new` says so."""

    def __init__(self, params: list[nn.Parameter], new: bool) -> None:
        self.params, self.new = params, new
        self.set_gradients()

    def set_gradients(self) -> None:
        for param in self.params:
            gradient = torch.full([1], 1e-3)
            if isinstance(param, DTensor):
                gradient = DTensor(
                    gradient, param._spec, requires_grad=False
                )  # as fully_shard does
            param.grad = gradient

    def prepare(self) -> None:
        if self.new:
            self.set_gradients()
        dist.barrier()


class Ours(Step):
    def __init__(self, params: list[nn.Parameter], new: bool) -> None:
        super().__init__(params, new)
        self.optimizer = ampfuse.optim.AdamW(params, max_grad_norm=_MAX_NORM)
        self.scaler = ampfuse.GradScaler("cpu", init_scale=1.0)
        self.scaler.scale(torch.ones(()))

    def __call__(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Torchs(Step):
    def __init__(self, params: list[nn.Parameter], new: bool) -> None:
        super().__init__(params, new)
        self.optimizer = torch.optim.AdamW(params, fused=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        self.scaler.scale(torch.ones(()))

    def __call__(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.params, _MAX_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def parameters(count: int, mesh: DeviceMesh | None) -> list[nn.Parameter]:
    """One element of each on each rank."""

    def value() -> Tensor:
        return (
            torch.ones(1)
            if mesh is None
            else distribute_tensor(torch.ones(mesh.size()), mesh, [Shard(0)])
        )

    return [nn.Parameter(value()) for _ in range(count)]


def main() -> None:
    """Measures both variants; the first rank writes the CSV."""
    options = options_of(__doc__, "sharded_host")
    torch.set_num_threads(1)
    if "RANK" in os.environ:  # torchrun's
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    count = 20 if options.quick else 2000
    results = Results(options)
    for kind in ("same", "new"):
        case = f"adamw-{count}x1-{mesh.size()}ranks-{kind}"
        if not results.want(case):
            continue
        new = kind == "new"
        routes: dict[str, Any] = {
            "ampfuse, whole": Ours(parameters(count, None), new),
            "ampfuse, shards": Ours(parameters(count, mesh), new),
            "torch fused, shards": Torchs(parameters(count, mesh), new),
        }
        times = measure(HostClock(options.device), routes, options.repeats)
        if dist.get_rank() == 0:
            results.add(
                rows_of(
                    options.device,
                    times,
                    params=count,
                    case=case,
                    optimizer="AdamW",
                    dtype="fp32",
                    does="unscale, clip",
                )
            )
    if dist.get_rank() == 0:
        results.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
