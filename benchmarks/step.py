"""The optimizer step of mixed-precision training against torch's routes and the machine's limit.

    python benchmarks/step.py                    # all cases, CPU, with 1 thread and with all
    python benchmarks/step.py --device cuda
    python benchmarks/step.py --only adamw-64M-bf16 --repeats 5

One step is: unscale, check for overflow, clip, update, cast back. The "limit" is what the step
would take at the bandwidth measured in the same rounds (limits.py). Writes one CSV row per variant;
table.py prints and plot.py draws them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from harness import RESULTS, Clock, Row, measure, rows_of, write
from limits import step_limit
from routes import SCALE, Ours, peers
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A step: an optimizer, the tensors it steps, and the precision of model and gradients."""

    name: str
    optimizer: str
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def params(self) -> int:
        return sum(self.sizes)

    @property
    def update_bytes(self) -> int:
        """Read and written per parameter: gradient, master, moments, half weight."""
        moments = {"AdamW": 2, "SGD": 1}[self.optimizer]
        model = 0 if self.dtype == torch.float32 else self.dtype.itemsize
        return self.dtype.itemsize + 8 + 8 * moments + model

    @property
    def total_bytes(self) -> int:
        """Of all arrays; what an update writes it also reads, but gradient and half weight."""
        model = 0 if self.dtype == torch.float32 else self.dtype.itemsize
        once = self.dtype.itemsize + model
        return self.params * (once + (self.update_bytes - once) // 2)


LARGE = (16_000_000,) * 4
SMALL = (500,) * 2000
CASES = (
    Case("adamw-64M-bf16", "AdamW", LARGE, torch.bfloat16),
    Case("adamw-64M-fp16", "AdamW", LARGE, torch.float16),
    Case("adamw-64M-fp32", "AdamW", LARGE, torch.float32),
    Case("sgd-64M-bf16", "SGD", LARGE, torch.bfloat16),
    Case("adamw-2000x500-bf16", "AdamW", SMALL, torch.bfloat16),
    Case("adamw-2000x500-fp16", "AdamW", SMALL, torch.float16),
)


def run(case: Case, device: torch.device, repeats: int) -> list[Row]:
    """Measures all variants of a case with as many threads as torch is set to."""
    random = torch.Generator(device).manual_seed(0)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=random, device=device)

    weights = [normal(size).mul_(0.02).to(case.dtype) for size in case.sizes]
    gradients = [normal(size).mul_(1e-3 * SCALE).to(case.dtype) for size in case.sizes]
    makers = {"ampfuse": partial(Ours, case.optimizer)}
    makers |= peers(case.optimizer, many=len(case.sizes) > 100)
    variants: dict[str, Callable[[], object]] = {
        "ampfuse": Ours(case.optimizer, weights, gradients)
    }
    variants |= {name: make(weights, gradients) for name, make in makers.items()}
    check_agreement(variants)
    if case.params >= 10_000_000:  # with less, calls and launches are the cost, not bandwidth
        variants["limit"] = step_limit(
            device, case.total_bytes, case.params, case.update_bytes, case.dtype.itemsize
        )
    return rows_of(case.name, device, measure(Clock(device), variants, repeats))


def check_agreement(variants: dict[str, Callable[[], object]]) -> None:
    """Takes a step by every route; they must arrive at the same weights."""
    for name, route in variants.items():
        getattr(route, "prepare", lambda: None)()
        route()
        for ours, theirs in zip(variants["ampfuse"].params, route.params, strict=True):
            # Half weights may differ by a unit in the last place, where FP32 values straddle a tie.
            torch.testing.assert_close(
                ours, theirs, rtol=2 * torch.finfo(ours.dtype).eps, atol=1e-6, msg=f"route {name}"
            )


def main() -> None:
    """Runs the cases and writes the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument(
        "--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}), help="CPU only"
    )
    parser.add_argument("--csv", type=Path, help="default: benchmarks/results/step_<device>.csv")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        options.threads = [1]
    path = options.csv or RESULTS / f"step_{device.type}.csv"
    rows: list[Row] = []
    for case in CASES:
        if options.only not in case.name:
            continue
        for threads in options.threads:
            torch.set_num_threads(threads)
            torch.compiler.reset()
            for row in run(case, device, options.repeats):
                print(
                    f"{row.case:20s} {row.threads} threads  {row.variant:18s}"
                    f"{row.median_ms:10.3f} ms  ({row.p20_ms:.3f} to {row.p80_ms:.3f})"
                )
                rows.append(row)
            sys.stdout.flush()
            write(path, rows)  # after every case: an interrupted run leaves what it has
    print(f"{len(rows)} rows in {path}")


if __name__ == "__main__":
    main()
