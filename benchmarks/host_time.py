"""How long the host is busy with a step of 2,000 tensors, against torch's scaler and clipping.

    python benchmarks/host_time.py [--device cuda] [--quick]

Two variants of each route: "same", where every tensor is where it was in the last step, and "new",
where every gradient is another tensor, as after ``zero_grad()`` and a backward pass. Torch's routes
are its AdamW with GradScaler and clip_grad_norm_, in half cases on FP32 masters with casts around
them (``routes.OnMasters``).

On a GPU this is the time of the Python call with the GPU idle before it, not waiting for what it
queued, on tensors of 64K elements. On a CPU the kernels run inside the call. There the tensors have
one element, so that next to nothing is left of the kernels but their calls, which count: the time
is an upper bound of the host's. For ampfuse there is a lower bound too, the row "ampfuse, without
its core": less the time inside the extension's one call that checks, decides and updates.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from harness import Times, measure, rows_of
from routes import Ours, peers
from step import Results, options_of, tensors_of
from torch import Tensor
from workloads import DTYPES, Case

from ampfuse.measuring import wait_for

_ROUTES = ("torch fused", "torch foreach")
_WITHOUT_CORE = "ampfuse, without its core"


class HostClock:
    """Times what the host does; the device is idle before it (see ``harness.Clock``)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def milliseconds(self, call: Any, queueing_ms: float = 0.0) -> float:
        wait_for(self.device)
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3


class NewGradients:
    """A route whose gradients are other tensors before each call."""

    def __init__(self, route: Any, gradients: list[Tensor]) -> None:
        self.route, self.gradients = route, gradients

    def prepare(self) -> None:
        self.route.set_gradients([gradient.clone() for gradient in self.gradients])

    def __call__(self) -> None:
        self.route()


class WithoutCore:
    """Our step; returns its time less that inside ``ParamTable.update``, in milliseconds."""

    def __init__(self, route: Any) -> None:
        self.route, self.prepare = route, getattr(route, "prepare", lambda: None)

    def __call__(self) -> float:
        optimizer = getattr(self.route, "route", self.route).optimizer
        table = optimizer._table
        optimizer._table = watched = _Watched(table)
        try:
            start = time.perf_counter()
            self.route()
            return (time.perf_counter() - start - watched.seconds) * 1e3
        finally:
            optimizer._table = table


class _Watched:
    """A ParamTable, and the seconds spent in its ``update``."""

    def __init__(self, table: Any) -> None:
        self._inner, self.seconds = table, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def update(self, **verdict: Any) -> None:
        start = time.perf_counter()
        self._inner.update(**verdict)
        self.seconds += time.perf_counter() - start


def host_times(case: Case, device: torch.device, repeats: int) -> dict[str, Times]:
    """Milliseconds by variant, for gradients that are the "same" and "new"."""
    times: dict[str, Times] = {}
    for kind in ("same", "new"):
        weights, gradients = tensors_of(case, device)
        routes: dict[str, Any] = {"ampfuse": Ours(case, weights, gradients)}
        for name, peer in peers(case, device).items():
            if name in _ROUTES:
                routes[name] = peer.build(case, weights, gradients)
        if kind == "new":
            routes = {name: NewGradients(route, gradients) for name, route in routes.items()}
        for route in routes.values():
            getattr(route, "prepare", lambda: None)()
            route()  # the first step makes the state
        if device.type == "cpu":
            core = {"ampfuse": routes["ampfuse"], _WITHOUT_CORE: WithoutCore(routes["ampfuse"])}
            routes = core | routes
        times[kind] = measure(HostClock(device), routes, repeats)
    return times


def main() -> None:
    """Measures both kinds in each precision and writes the CSV."""
    options = options_of(__doc__, "host_time")
    device = options.device
    tensors = "2000x64K" if device.type == "cuda" else "2000x1"
    torch.set_num_threads(1)
    results = Results(options)
    for precision in DTYPES:
        case = Case("AdamW", tensors, precision, quick=options.quick)
        if not results.want(case.name):
            continue
        for kind, times in host_times(case, device, options.repeats).items():
            found = rows_of(
                device,
                times,
                params=case.params,
                case=f"{case.name}-{kind}",
                optimizer=case.optimizer,
                dtype=precision,
                does=case.does,
            )
            results.add(found)
    results.finish()


if __name__ == "__main__":
    main()
