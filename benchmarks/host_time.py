"""How long the host is busy with steps whose kernels are next to nothing.

    python benchmarks/host_time.py [--device cuda] [--quick] [--only TEXT ...]
    torchrun --nproc-per-node 2 benchmarks/host_time.py --csv ...    # the cases "sharded-..."

On a GPU a time is that of the Python calls with the GPU idle before them, not waiting for what they
queued. On a CPU the kernels run inside the calls and count, so tensors are tiny: an upper bound of
the host's time. What ampfuse is compared with runs in a process that never imports it. Cases:

adamw-..., sharded-...
    a step of 2,000 tensors (of 64K elements on a GPU, else of one) against torch's AdamW with
    GradScaler and clip_grad_norm_, in half cases on FP32 masters with casts around them. "same":
    every tensor is where it was in the last step. "new": every gradient is another tensor, as after
    ``zero_grad()`` and a backward pass. Sharded parameters are DTensors as in FSDP2's loops, one
    element on each rank; ranks begin together, and the time includes their collectives.
mlp-..., transformer-...
    training at O1 against torch.amp: 37 linear layers of width 8, and 6 encoder layers of width 16.
    "pass" is forward pass, loss and backward pass with what amp does around them; "step" adds
    torch's SGD, which ampfuse steps in its fused form. "ampfuse.compat" is the same by apex's
    names, whose autocast stays on outside of the model.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.cases import DTYPES, Case
from harness.measuring import HostClock, Variant, Worker, measure
from harness.results import Results, Row, options_of, rows_of
from harness.routes import NewGradients, Ours, Peer, peer_route, peers, tensors_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

_ROUTES = ("torch fused", "torch foreach")
KINDS = ("same", "new")


def prepared(route: Any, kind: str) -> Any:
    """After its first step, which makes the state."""
    route = NewGradients(route) if kind == "new" else route
    route.prepare()
    route()
    return route


def steps_of(case: Case, kind: str, options: Any, worker: Worker) -> list[Row]:
    """Of whole tensors."""
    ours = prepared(Ours(case, *tensors_of(case, options.device)), kind)
    variants: dict[str, Any] = {"ampfuse": Variant(HostClock(options.device), ours)}
    for name, peer in peers(case, options.device).items():
        if name in _ROUTES:
            variants[name] = worker.variant(peer_route, case, options.device, peer, kind == "new")
    return rows(case, f"{case.name}-{kind}", variants, options)


def rows(case: Case, name: str, variants: dict[str, Any], options: Any) -> list[Row]:
    times = measure(variants, options.repeats)
    return rows_of(options.device, times, **case.columns | {"case": name})


# ---- sharded parameters --------------------------------------------------------------------------


class Sharded:
    """A route whose parameters and gradients are shards; all ranks begin together.

    Arguments:
        peer: whose route it is; None: ours.
    """

    def __init__(self, case: Case, peer: Peer | None, kind: str) -> None:
        ensure_group()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        weights, gradients = (
            [DTensor.from_local(tensor, mesh, [Shard(0)]) for tensor in tensors]
            for tensors in tensors_of(case, torch.device("cpu"))
        )
        build = peer.build if peer else Ours
        self.route = prepared(build(case, weights, gradients), kind)

    def prepare(self) -> None:
        self.route.prepare()
        dist.barrier()

    def __call__(self) -> None:
        self.route()


def ensure_group() -> None:
    """torchrun's processes, or this one alone."""
    if dist.is_initialized():
        return
    if "RANK" in os.environ:
        # A worker's group is beside that of the process that started it.
        beside = int(torch.multiprocessing.parent_process() is not None)
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1 + beside)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def shards_of(case: Case, kind: str, options: Any, worker: Worker) -> list[Row]:
    clock = HostClock(options.device)
    fused = peers(case, options.device)["torch fused"]
    whole = prepared(Ours(case, *tensors_of(case, options.device)), kind)
    variants = {
        "ampfuse, whole": Variant(clock, whole),
        "ampfuse, shards": Variant(clock, Sharded(case, None, kind)),
        "torch fused, shards": worker.variant(Sharded, case, fused, kind),
    }
    ranks = f"{dist.get_world_size()}ranks"
    return rows(case, f"sharded-{case.name}-{ranks}-{kind}", variants, options)


# ---- training at O1 ------------------------------------------------------------------------------


def mlp() -> nn.Module:
    """Of 37 linear layers; takes (batch, 8)."""
    layers: list[nn.Module] = []
    for _ in range(37):
        layers += [nn.Linear(8, 8), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def transformer() -> nn.Module:
    """Of 6 encoder layers; takes (batch, length, 16)."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (8, 8)),
    "transformer": (transformer, (4, 8, 16)),
}


class Training:
    """A step of training: plain FP32."""

    def __init__(self, model: str, device: torch.device, steps: bool) -> None:
        torch.manual_seed(0)
        make, shape = MODELS[model]
        self.model = make().to(device)
        self.x = torch.randn(shape, device=device)
        self.y = torch.randn(shape, device=device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.steps = steps

    def loss(self) -> Tensor:
        return F.mse_loss(self.model(self.x), self.y)

    def backward(self) -> None:
        self.loss().backward()

    def step(self) -> None:
        self.optimizer.step()

    def answer(self) -> float:
        return float(self.loss().detach())

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        if self.steps:
            self.step()


class TorchAmp(Training):
    def __init__(self, model: str, device: torch.device, steps: bool) -> None:
        super().__init__(model, device, steps)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)

    def backward(self) -> None:
        with torch.autocast(self.x.device.type, dtype=torch.float16):
            loss = self.loss()
        self.scaler.scale(loss).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class O1(Training):
    """By ampfuse.amp, or by another module with its functions."""

    amp = "ampfuse.amp"

    def __init__(self, model: str, device: torch.device, steps: bool) -> None:
        super().__init__(model, device, steps)
        self.api = importlib.import_module(self.amp)
        self.api.initialize(self.model, self.optimizer, opt_level="O1", verbosity=0)

    def backward(self) -> None:
        with self.api.scale_loss(self.loss(), self.optimizer) as scaled:
            scaled.backward()


class Alias(O1):
    amp = "ampfuse.compat.apex.amp"


# A process each, for what amp does to the process it is in.
TRAININGS: dict[str, type[Training]] = {
    "torch.amp": TorchAmp,
    "FP32": Training,
    "ampfuse O1": O1,
    "ampfuse.compat": Alias,
}


@contextmanager
def trainings(model: str, device: torch.device, steps: bool) -> Iterator[dict[str, Any]]:
    """Variants by what their rows are called."""
    workers = {
        name: Worker(HostClock, device, issubclass(TRAININGS[name], O1)) for name in TRAININGS
    }
    try:
        yield {
            name: worker.variant(TRAININGS[name], model, device, steps)
            for name, worker in workers.items()
        }
    finally:
        for worker in workers.values():
            worker.close()


def trainings_of(model: str, what: str, options: Any) -> list[Row]:
    repeats = options.repeats if options.quick else max(options.repeats, 200)
    with trainings(model, options.device, what == "step") as variants:
        times = measure(variants, repeats, warm_up=5)
    return rows_of(options.device, times, case=f"{model}-{what}", optimizer="SGD", dtype="float16")


def main() -> None:
    """Measures every variant of each case and writes the CSV."""
    options = options_of(__doc__, "host_time")
    torch.set_num_threads(1)
    device, results = options.device, Results(options)
    tensors = "2000x64K" if device.type == "cuda" else "2000x1"
    steps = [Case("AdamW", tensors, precision, quick=options.quick) for precision in DTYPES]
    ranks = "RANK" in os.environ  # torchrun's: only what is about ranks
    with Worker(HostClock, device) as worker:
        for case, kind in product(steps if not ranks else (), KINDS):
            if results.want(f"{case.name}-{kind}"):
                results.add(steps_of(case, kind, options, worker))
                worker.clear()
        for kind in KINDS if device.type == "cpu" and results.want("sharded-adamw") else ():
            found = shards_of(steps[0], kind, options, worker)
            if dist.get_rank() == 0:
                results.add(found)
            worker.clear()
    for model in MODELS if not ranks else ():
        for what in ("pass", "step"):
            if results.want(f"{model}-{what}"):
                results.add(trainings_of(model, what, options))
    if results.rows or not ranks:
        results.finish()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
