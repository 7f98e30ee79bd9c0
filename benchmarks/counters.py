"""A GPU's counters of our kernels, by ncu: what they move, and what their warps wait for.

    python benchmarks/counters.py            # a line of CSV for each launch

The launches come in the order of `calls`. A step's kernels inspect and apply; a batch norm's are
moments, finish, apply, reduce, finish and dx.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import torch
from harness.cases import Case
from harness.routes import AmpfuseRoute
from layers import Call

STALLS = "no_instruction math_pipe_throttle wait branch_resolving short_scoreboard long_scoreboard"
METRICS = """
gpu__time_duration.sum
dram__throughput.avg.pct_of_peak_sustained_elapsed
dram__bytes_read.sum dram__bytes_write.sum
lts__t_sectors_op_read.sum lts__t_sectors_op_write.sum
sm__warps_active.avg.pct_of_peak_sustained_active
smsp__inst_executed.sum
smsp__issue_active.avg.pct_of_peak_sustained_active
launch__registers_per_thread""".split()
for _stall in STALLS.split():
    METRICS.append(f"smsp__average_warps_issue_stalled_{_stall}_per_issue_active.ratio")
for _pipe in ("alu", "fma", "xu", "lsu"):
    METRICS.append(f"sm__inst_executed_pipe_{_pipe}.avg.pct_of_peak_sustained_active")
CASE = Case("AdamW", "64M", "bf16")
MODES = "ampfuse", "ampfuse 8bit", "ampfuse split 8bit", "ampfuse split bf16"


def calls(device: torch.device, case: Case = CASE) -> Iterator[Callable[[], object]]:
    """A step in each of the `MODES`, and a batch norm forward and backward."""
    for mode in MODES:
        yield AmpfuseRoute(case, device, mode)
    yield Call("norm-256-56-residual", "fused", device)


def command() -> list[str]:
    """ncu, which runs this script."""
    kernels = ["-k", "regex:(inspect|measure|apply|sum|finish|map)_kernel"]
    ncu = ["ncu", "--clock-control", "none", "--profile-from-start", "off", *kernels]
    ncu += ["--metrics", ",".join(METRICS), "--csv", "--page", "raw"]
    return [*ncu, sys.executable, __file__, "--profiled"]


def profiled(device: torch.device) -> None:
    """Each of the `calls`, warmed up."""
    for call in calls(device):
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        with torch.cuda.profiler.profile():
            call()
            torch.cuda.synchronize()


def main() -> None:
    """Becomes ncu, whose command is this script again."""
    if "--profiled" in sys.argv:
        return profiled(torch.device("cuda"))
    os.execvp("ncu", command())


if __name__ == "__main__":
    main()
