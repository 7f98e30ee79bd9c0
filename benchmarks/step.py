"""The optimizer step of mixed-precision training against its peers and the machine's limit.

    python benchmarks/step.py                    # CPU, with 1 thread and with all
    python benchmarks/step.py --device cuda
    python benchmarks/step.py --all              # more cases: see workloads.py
    python benchmarks/step.py --only adamw-64M-bf16 --repeats 5
    python benchmarks/step.py --no-compile       # half the time: not what torch.compile makes
    python benchmarks/step.py --modes --only adamw-64M-bf16 --csv ...   # the memory modes too
    python benchmarks/step.py --quick            # does it run? a hundredth of each size

One step is: unscale, check for overflow, clip, update, cast back. The "limit" is what the step
would take at the bandwidth measured in the same rounds, "copy" at copy bandwidth (limits.py).
Writes one CSV row per variant; table.py prints and plot.py draws them. Peers are other libraries,
measured where they are installed (routes.py).

DeepSpeed's CPUAdam is compiled at its first use (half a minute), by the system's g++ and by ninja,
which has to be on PATH, against the torch that runs; it asks for no further option. In an
environment of its own, where ampfuse is installed too:

    python -m venv build/peers
    build/peers/bin/pip install 'torch==2.14.*' deepspeed ninja
    build/peers/bin/pip install .
    PATH=build/peers/bin:$PATH python benchmarks/step.py --only alone
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import RESULTS, Clock, Row, Times, measure, print_rows, rows_of, write
from limits import bounds
from routes import MODES, SCALE, Ours, Peer, peers
from torch import Tensor
from workloads import Case, cases

_ARRAY_BYTES = {"cpu": 1 << 30, "cuda": 4 << 30}  # that bandwidth is measured on


def run(
    case: Case, device: torch.device, repeats: int, compiled: bool = True, modes: bool = False
) -> list[Row]:
    """Measures all variants of a case with as many threads as torch is set to."""
    weights, gradients = tensors_of(case, device)
    ours = Ours(case, weights, gradients)
    ours()
    expected = [param.detach().clone() for param in ours.params]
    variants: dict[str, Any] = {"ampfuse": ours}
    moved = {"ampfuse": ours.bytes_per_param}
    for mode in MODES if modes and case.optimizer == "AdamW" and case.half else ():
        variants[f"ampfuse {mode}"] = route = Ours(case, weights, gradients, mode)
        moved[f"ampfuse {mode}"] = route.bytes_per_param
        route()
    if case.moves_memory:
        array_bytes = 64 << 20 if case.quick else _ARRAY_BYTES[device.type]
        sizes = case.params, case.update_bytes, case.inspect_bytes
        variants |= bounds(device, array_bytes, *sizes)
        moved |= dict.fromkeys(("copy", "limit"), float(case.step_bytes))

    clock = Clock(device)
    candidates = peers(case, device, compiled)
    times: Times = {}
    for some in _sittings(case, device, candidates):
        routes = _first_steps(case, some, weights, gradients, expected)
        moved |= {name: route.bytes_per_param for name, route in routes.items()}
        if routes or not times:
            for name, values in measure(clock, variants | routes, repeats).items():
                times.setdefault(name, []).extend(values)
        routes.clear()  # before the next are built: memory holds so many
    return rows_of(
        device,
        times,
        params=case.params,
        bytes_per_param=moved,
        peers={name: peer.version for name, peer in candidates.items()},
        case=case.name,
        optimizer=case.optimizer,
        dtype=case.precision,
        does=case.does,
    )


def tensors_of(case: Case, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Model weights, and gradients that carry the scale if the case has one."""
    random = torch.Generator(device).manual_seed(0)

    def normal(size: int, deviation: float) -> Tensor:
        values = torch.randn(size, generator=random, device=device)
        return values.mul_(deviation).to(case.dtype)

    scale = SCALE if case.scaled else 1.0
    return (
        [normal(size, 0.02) for size in case.sizes],
        [normal(size, 1e-3 * scale) for size in case.sizes],
    )


def _sittings(
    case: Case, device: torch.device, candidates: dict[str, Peer]
) -> Iterator[dict[str, Peer]]:
    """The peers, in as few parts as memory holds side by side; ours is measured with each part."""
    # Per parameter: weight, FP32 master, its gradient, two moments. And what one call needs.
    route, call = 20 * case.params, 24 * case.params
    room = max(1, (_free_bytes(device) - call) // route)
    names = list(candidates)
    for begin in range(0, max(1, len(names)), room):
        yield {name: candidates[name] for name in names[begin : begin + room]}


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/meminfo has no line MemAvailable")


def _first_steps(
    case: Case,
    candidates: dict[str, Peer],
    weights: list[Tensor],
    gradients: list[Tensor],
    expected: list[Tensor],
) -> dict[str, Any]:
    """The peers' routes, each after a step that arrived where ours did.

    A peer that is not installed or does not run is named, and keeps no other from being measured.
    """
    routes: dict[str, Any] = {}
    for name, peer in candidates.items():
        try:
            route = peer.build(case, weights, gradients)
            getattr(route, "prepare", lambda: None)()
            route()
            if peer.agrees:
                _check_agreement(expected, route.params)
        except ImportError as error:
            print(f"{case.name:28s} {name}: not installed ({error})")
        except Exception as error:
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            print(f"{case.name:28s} {name}: not run ({type(error).__name__}: {reason})")
        else:
            routes[name] = route
    return routes


def _check_agreement(expected: list[Tensor], params: list[Tensor]) -> None:
    for ours, theirs in zip(expected, params, strict=True):
        # Half weights may differ by a unit in the last place, where FP32 values straddle a tie.
        rtol = 2 * torch.finfo(ours.dtype).eps
        torch.testing.assert_close(theirs.detach(), ours, rtol=rtol, atol=1e-6)


def options_of(description: str | None, name: str) -> argparse.Namespace:
    """The command line: `device`, `threads`, `repeats`, `quick`, `csv` and which cases."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="cases whose name holds one of these",
    )
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--all", action="store_true", help="more cases")
    parser.add_argument("--modes", action="store_true", help="the memory modes of AdamW too")
    parser.add_argument("--quick", action="store_true", help="small sizes, 3 repeats, no results")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--threads", type=int, nargs="+", help="CPU only (1 and all)")
    parser.add_argument("--csv", type=Path, help=f"benchmarks/results/{name}_<device>.csv")
    options = parser.parse_args()
    options.device = torch.device(options.device)
    kind = options.device.type
    if kind == "cuda":
        options.threads = [1]
    options.threads = options.threads or sorted({1, os.cpu_count() or 1})
    options.repeats = options.repeats or (3 if options.quick else 9 if kind == "cpu" else 21)
    folder = Path(tempfile.gettempdir()) if options.quick else RESULTS
    options.csv = options.csv or folder / f"{name}_{kind}.csv"
    return options


class Results:
    """The rows of the cases that `options` want: printed, and in the CSV, as each is measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rows: list[Row] = []

    def want(self, name: str) -> bool:
        """Whether `--only` names the case `name`."""
        return any(text in name for text in self.options.only)

    def add(self, rows: list[Row]) -> None:
        print_rows(rows)
        self.rows += rows
        write(self.options.csv, self.rows)  # now: an interrupted run leaves what it has

    def finish(self) -> None:
        """Say what was written. Raises SystemExit if no case was wanted."""
        if not self.rows:
            texts = " or ".join(map(repr, self.options.only))
            raise SystemExit(f"no case's name holds {texts}")
        print(f"{len(self.rows)} rows in {self.options.csv}")


def main() -> None:
    """Runs the cases and writes the CSV."""
    options = options_of(__doc__, "step")
    results = Results(options)
    for case in cases(options.device.type, options.all):
        if not results.want(case.name):
            continue
        for threads in options.threads:
            torch.set_num_threads(threads)
            torch.compiler.reset()
            case = replace(case, quick=options.quick)
            compiled = not options.no_compile
            results.add(run(case, options.device, options.repeats, compiled, options.modes))
    results.finish()


if __name__ == "__main__":
    main()
