"""The optimizer step of mixed-precision training against its peers and the machine's limit.

    python benchmarks/step.py                    # CPU, with 1 thread and with all
    python benchmarks/step.py --device cuda
    python benchmarks/step.py --only adamw-64M-bf16 --repeats 5
    python benchmarks/step.py --modes --only adamw-64M-bf16 --csv ...   # the memory modes too
    python benchmarks/step.py --meter --only bf16 --csv ...             # metered steps too
    python benchmarks/step.py --skips --only 64M-bf16 --csv ...         # the cost of step checks

docs/benchmarks.md describes the steps, the limits and the host's time. Writes one CSV row per
variant; report.py prints them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from harness.cases import Case, cases, host_cases
from harness.limits import bounds, muon_bounds
from harness.measuring import Clock, Times, Variant, Worker, WorkerError, measure
from harness.options import options_of
from harness.results import Results, Row, rows_of
from harness.routes import METER, MODES, SKIPS, AmpfuseRoute, peer_route, peers, started, tensors_of


def run(case: Case, clock: Any, worker: Worker, options: Any) -> list[Row]:
    """Measures all variants of a case with as many threads as torch is set to."""
    device = clock.device
    route = started(AmpfuseRoute(case, device))
    expected = route.answer()
    moved = {"ampfuse": route.bytes_per_param}
    ours: dict[str, Callable[[], float]] = {"ampfuse": Variant(clock, route)}
    if case.moves_memory:
        ours |= bounds(clock, case.params, case.update_bytes, case.inspect_bytes)
        moved |= dict.fromkeys(("copy", "limit"), float(case.step_bytes))
    elif case.optimizer == "Muon":
        ours |= muon_bounds(tensors_of(case, device)[1], clock)
    candidates = peers(case, device, not options.no_compile)
    times: Times = {name: [] for name in ours}

    def measure_beside_ours(name: str, variant: Callable[[], float]) -> None:
        for one, values in measure(ours | {name: variant}, options.repeats).items():
            times.setdefault(one, []).extend(values)

    variants = [*(METER if options.meter else ()), *(SKIPS if options.skips else ())]
    if options.modes and case.optimizer == "AdamW" and case.half:
        variants += MODES
    for name in variants:  # one at a time, for memory's sake
        route = started(AmpfuseRoute(case, device, name))
        moved[name] = route.bytes_per_param
        measure_beside_ours(name, Variant(clock, route))
        del route
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the peers' process
    for name, peer in candidates.items():
        try:
            theirs = worker.variant(peer_route, case, device, peer)
            if peer.agrees:
                _check_agreement(case, expected, theirs.answer())
        except (WorkerError, AssertionError) as error:  # keeps no other from being measured
            print(f"{case.name:28s} {name}: not run ({str(error).splitlines()[0]})")
        else:
            measure_beside_ours(name, theirs)
        worker.clear()
    if not times["ampfuse"]:  # nothing else ran
        times = measure(ours, options.repeats)
    versions = {name: peer.version for name, peer in candidates.items() if name in times}
    return rows_of(device, times, bytes_per_param=moved, peers=versions, **case.columns)


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
        skips="steps that skip_nonfinite and skip_spikes check too",
        host="the host's time, on one thread",
    )
    results, kind = Results(options), options.device.type
    found = host_cases(kind) if options.host else cases(kind, options.all)
    with Worker(options.device, host=options.host) as worker:
        for case in (case for case in found if results.want(case.name)):
            for threads in options.threads:
                torch.set_num_threads(threads)
                clock = Clock(options.device, options.host)
                quick = replace(case, quick=options.quick)
                results.add(run(quick, clock, worker, options))
    results.finish()


if __name__ == "__main__":
    main()
