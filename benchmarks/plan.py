"""What ``ampfuse.plan`` says of the networks of nets.py, against the peaks that were measured:

    python benchmarks/plan.py         for results/nets_xeon.csv, nets_cpu.csv and nets_cuda.csv

Their column memory_mib has, of a CPU, the most at one time that a step allocated, and of a GPU all
that was allocated. Here both are all tensors, in MiB. Nothing is measured, so any machine can do
it: in fifteen minutes on two cores, or with ``--only`` less. It writes results/plan.csv.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness.measuring import COLD_BYTES
from harness.models import TEXTS, image_model, text_model
from harness.results import options_of, read, write
from nets import NETWORKS, loss_of, optimizer_of, size_of
from torch import Tensor, nn

import ampfuse
from ampfuse.insight.memory_plan import PlannedTraining

RESULTS = Path(__file__).parent / "results"
# Of two rows of one network and variant the later file's counts.
SOURCES = {"cpu": ["nets_xeon.csv", "nets_cpu.csv"], "cuda": ["nets_cuda.csv"]}
# By variant of nets.py: level, whether the model is fused, and the changes of a plan.
VARIANTS: dict[str, tuple[str, bool, tuple[str, ...]]] = {
    "FP32": ("O0", False, ()),
    "O4": ("O4", False, ()),
    "O5, unfused": ("O5", False, ()),
    "O5": ("O5", True, ()),
    "O5, recomputed": ("O5", True, ("recompute_norms",)),
}


@dataclass
class PlanRow:
    """One network in one variant."""

    case: str
    variant: str
    device: str
    planned_mib: float
    measured_mib: float
    hardware: str
    measured_on: str


def training_of(network: str, kind: str, fuse: bool) -> PlannedTraining:
    side, batch = size_of(network, False, torch.device(kind))
    labels: tuple[int, ...] = (batch,)
    with torch.device("meta"):
        if network in TEXTS:
            model, _, _ = text_model(network, side)
            x = torch.empty(batch, side, dtype=torch.int64)
            labels = labels if network.startswith("bert") else (batch, side)
        else:
            model = image_model(network, side, classes=100).to(memory_format=torch.channels_last)
            x = torch.empty(batch, 3, side, side).to(memory_format=torch.channels_last)
        y = torch.empty(labels, dtype=torch.int64)

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        params = model.parameters()
        if optimizer_of(network) == "SGD":
            return ampfuse.optim.SGD(params, lr=1e-3, momentum=0.9)
        return ampfuse.optim.AdamW(params)

    def loss_function(model: nn.Module, batch: Any) -> Tensor:
        return loss_of(model(batch[0]), batch[1])

    return PlannedTraining(model, (x, y), loss_function, kind, make_optimizer, fuse, False)


def main() -> None:
    """Plans every variant that was measured, and writes the CSV."""
    options = options_of(__doc__, "plan")
    rows = []
    for kind, files in SOURCES.items():
        of_files = [row for file in files for row in read(RESULTS / file) if row.memory_mib > 0]
        measured = {(row.case, row.variant): row for row in of_files}
        for network, (name, *_) in NETWORKS.items():
            found = {
                variant: row
                for (case, variant), row in measured.items()
                if case.startswith(f"{name} (") and variant in VARIANTS
            }
            if not any(text in network for text in options.only):
                continue
            for variant, row in found.items():
                level, fuse, changes = VARIANTS[variant]
                held = training_of(network, kind, fuse).held(level, {}, changes)
                between = sum(held[each] for each in ("weights", "masters", "states"))
                # On a GPU the clock of nets.py holds an array of its own.
                peak = row.memory_mib + (between if kind == "cpu" else -COLD_BYTES) / 2**20
                rows.append(
                    PlanRow(
                        row.case,
                        variant,
                        kind,
                        round(held["peak"] / 2**20, 1),
                        round(peak, 1),
                        row.hardware,
                        row.date,
                    )
                )
                print(rows[-1], f"{rows[-1].planned_mib / rows[-1].measured_mib - 1:+.1%}")
    if rows and not options.quick and options.only == [""]:
        write(RESULTS / "plan.csv", rows)


if __name__ == "__main__":
    main()
