"""The optimizer step of mixed-precision training against its peers and the machine's limit.

    python benchmarks/step.py                    # CPU, with 1 thread and with all
    python benchmarks/step.py --device cuda
    python benchmarks/step.py --all              # more cases: see harness/cases.py
    python benchmarks/step.py --only adamw-64M-bf16 --repeats 5
    python benchmarks/step.py --no-compile       # half the time: not what torch.compile makes
    python benchmarks/step.py --modes --only adamw-64M-bf16 --csv ...   # the memory modes too
    python benchmarks/step.py --meter --only bf16 --csv ...             # metered steps too
    python benchmarks/step.py --quick            # does it run? a hundredth of each size

One step is: unscale, check for overflow, clip, update, cast back. The "limit" is what the step
would take at the bandwidth measured in the same rounds, "copy" at copy bandwidth
(harness/limits.py). Peers (harness/routes.py) are measured where they are installed, in a process
that never imports ampfuse. Writes one CSV row per variant; report.py prints and draws them.

"metered" is a step that ``optimizer.meter`` reads, "metered, bits" one with ``changed_bits``, and
"meter off" a step between two metered ones: it runs the kernels of a plain one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from harness.cases import Case, cases
from harness.limits import bounds
from harness.measuring import Clock, Times, Variant, Worker, WorkerError, measure
from harness.results import Results, Row, options_of, rows_of
from harness.routes import MODES, Ours, Route, peer_route, peers, tensors_of

_ARRAY_BYTES = {"cpu": 1 << 30, "cuda": 4 << 30}  # that bandwidth is measured on
METER = {
    "meter off": {"every": 2**30, "history": 1},
    "metered": {"every": 1, "history": 1},
    "metered, bits": {"every": 1, "history": 1, "changed_bits": True},
}


def run(
    case: Case,
    device: torch.device,
    repeats: int,
    worker: Worker,
    *,
    compiled: bool = True,
    modes: bool = False,
    meter: bool = False,
) -> list[Row]:
    """Measures all variants of a case with as many threads as torch is set to."""
    routes = routes_of_ours(case, device, meter)
    expected = routes["ampfuse"].answer()[1]
    clock = Clock(device)
    moved = {name: route.bytes_per_param for name, route in routes.items()}
    ours = {name: Variant(clock, route) for name, route in routes.items()}
    if case.moves_memory:
        array_bytes = 64 << 20 if case.quick else _ARRAY_BYTES[device.type]
        ours |= bounds(device, array_bytes, case.params, case.update_bytes, case.inspect_bytes)
        moved |= dict.fromkeys(("copy", "limit"), float(case.step_bytes))
    candidates = peers(case, device, compiled)
    times: Times = {name: [] for name in ours}

    def measure_beside_ours(name: str, variant: Callable[[], float]) -> None:
        for one, values in measure(ours | {name: variant}, repeats).items():
            times.setdefault(one, []).extend(values)

    # One at a time, for memory's sake.
    for mode in MODES if modes and case.optimizer == "AdamW" and case.half else ():
        route = Ours(case, *tensors_of(case, device), mode)
        route()
        moved[f"ampfuse {mode}"] = route.bytes_per_param
        measure_beside_ours(f"ampfuse {mode}", Variant(clock, route))
        del route
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the peers' process
    for name, peer in candidates.items():
        try:
            theirs = worker.variant(peer_route, case, device, peer)
            moved[name], weights = theirs.answer()
            if peer.agrees:
                _check_agreement(case, expected, weights)
        except (WorkerError, AssertionError) as error:  # keeps no other from being measured
            why = "not installed" if getattr(error, "missing", False) else "not run"
            print(f"{case.name:28s} {name}: {why} ({str(error).splitlines()[0]})")
        else:
            measure_beside_ours(name, theirs)
        worker.clear()
    if not times["ampfuse"]:  # nothing else ran
        times = measure(ours, repeats)
    versions = {name: peer.version for name, peer in candidates.items()}
    return rows_of(device, times, bytes_per_param=moved, peers=versions, **case.columns)


def routes_of_ours(case: Case, device: torch.device, meter: bool = False) -> dict[str, Route]:
    """Ours by what their rows are called, each after its first step; not in the memory modes."""
    tensors = tensors_of(case, device)
    routes = {"ampfuse": Ours(case, *tensors)}
    for name, options in METER.items() if meter else ():
        routes[f"ampfuse, {name}"] = route = Ours(case, *tensors)
        route.optimizer.meter(**options)
    for route in routes.values():
        route()
    return routes


def _check_agreement(case: Case, ours: list[list[float]], theirs: list[list[float]]) -> None:
    # Half weights may differ by a unit in the last place, where FP32 values straddle a tie.
    rtol = 2 * torch.finfo(case.dtype).eps
    for expected, found in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(expected), rtol=rtol, atol=1e-6
        )


def main() -> None:
    """Runs the cases and writes the CSV."""
    options = options_of(
        __doc__,
        "step",
        no_compile="leave out torch.compile",
        all="more cases",
        modes="the memory modes of AdamW too",
        meter="metered steps too",
    )
    results = Results(options)
    wanted = [c for c in cases(options.device.type, options.all) if results.want(c.name)]
    with Worker(Clock, options.device) as worker:
        for case in wanted:
            for threads in options.threads:
                torch.set_num_threads(threads)
                rows = run(
                    replace(case, quick=options.quick),
                    options.device,
                    options.repeats,
                    worker,
                    compiled=not options.no_compile,
                    modes=options.modes,
                    meter=options.meter,
                )
                results.add(rows)
    results.finish()


if __name__ == "__main__":
    main()
