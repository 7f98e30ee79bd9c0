"""The plans of ``ampfuse.plan`` for the models of nets.py, against the peaks that were measured.

    python benchmarks/plan.py            for results/nets_xeon.csv, nets_cpu.csv and nets_cuda.csv
    python benchmarks/plan.py --modes    for steps in the memory modes, which it takes on this CPU

Both write results/plan.csv, each its rows: all tensors, in MiB. The first measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import harness.environment  # noqa: F401 - before torch, which reads the environment
import torch
from harness.measuring import COLD_BYTES, Worker, held_bytes
from harness.options import options_of
from harness.results import RESULTS, Record, conditions, put, read, records_of
from nets import NETWORKS, AmpfuseStep, case_of, loss_of, model_and_batch, optimizer_of
from torch import Tensor, nn

import ampfuse
from ampfuse.insight.memory_plan import PlannedTraining

# A row of a later file replaces the same network's and variant's of an earlier one.
SOURCES = {"cpu": ["nets_xeon.csv", "nets_cpu.csv"], "cuda": ["nets_cuda.csv"]}


@dataclass(frozen=True)
class Variant:
    """A level, whether the model is fused and compiled, changes of a plan, and a memory mode."""

    level: str = "O5"
    fuse: bool = True
    compiled: bool = False
    changes: tuple[str, ...] = ()
    memory: Mapping[str, Any] = field(default_factory=dict)


VARIANTS = {
    "FP32": Variant("O0", fuse=False),
    "O4": Variant("O4", fuse=False),
    "O5, unfused": Variant(fuse=False),
    "O5": Variant(),
    "O5, recomputed": Variant(changes=("recompute_norms",)),
    "O5, compiled": Variant(compiled=True),
}
MODES = {
    "O5, split": Variant(memory={"master_weights": "split"}),
    "O5, 8bit": Variant(memory={"state_dtype": "8bit"}),
    "O5, split, 8bit": Variant(memory={"master_weights": "split", "state_dtype": "8bit"}),
    "O5, no masters": Variant(memory={"master_weights": False}),
}

# One network in one variant.
COLUMNS = "case", "variant", "device", "planned_mib", "measured_mib", "hardware", "measured_on"


def planned(network: str, kind: str, variant: Variant) -> dict[str, int]:
    """Bytes by kind."""
    with torch.device("meta"):
        model, x, y = model_and_batch(network, False, kind)

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        params = model.parameters()
        if optimizer_of(network) == "SGD":
            return ampfuse.optim.SGD(params, lr=1e-3, momentum=0.9)
        return ampfuse.optim.AdamW(params)

    def loss_function(model: nn.Module, batch: Any) -> Tensor:
        return loss_of(model(batch[0]), batch[1])

    training = PlannedTraining(
        model, (x, y), loss_function, kind, make_optimizer, variant.fuse, variant.compiled
    )
    return training.held(variant.level, variant.memory, variant.changes)


def measured_before(network: str, options: Any) -> Iterator[Record]:
    """By nets.py."""
    name = NETWORKS[network][0]
    for kind, files in SOURCES.items():
        of_files = [row for file in files for row in read(RESULTS / file) if row.memory_mib > 0]
        rows = {row.variant: row for row in of_files if row.case.startswith(f"{name} (")}
        for label in rows.keys() & VARIANTS.keys():
            row, held = rows[label], planned(network, kind, VARIANTS[label])
            between = sum(held[each] for each in ("weights", "masters", "states"))
            # On a GPU the clock of nets.py holds an array of its own.
            peak = row.memory_mib + (between if kind == "cpu" else -COLD_BYTES) / 2**20
            yield row_of(row.case, label, kind, held, peak, row.hardware, row.date)


class Held(AmpfuseStep):
    """A step whose gradients go at once, so that nothing but the training is held after it."""

    def step(self) -> None:
        super().step()
        self.optimizer.zero_grad()

    def answer(self) -> int:
        return held_bytes(self.model, self.optimizer)


def measured_now(network: str, options: Any) -> Iterator[Record]:
    """In a process for each mode."""
    for label, variant in MODES.items():
        with Worker(options.device, with_ampfuse=True) as worker:
            make = partial(Held, memory=variant.memory)
            call = worker.variant(make, network, False, options.device)
            call()
            peak = call.memory_mib() + call.answer() / 2**20
        where = conditions(options.device)
        held = planned(network, "cpu", variant)
        case = case_of(network, options)
        yield row_of(case, label, "cpu", held, peak, where["hardware"], where["date"])


def row_of(
    case: str, label: str, kind: str, held: dict[str, int], peak: float, *where: str
) -> Record:
    mib = round(held["peak"] / 2**20, 1), round(peak, 1)
    row = dict(zip(COLUMNS, (case, label, kind, *mib, *where), strict=True))
    print(row, f"{mib[0] / mib[1] - 1:+.1%}", flush=True)
    return row


def main() -> None:
    """Plans every variant that was measured, and writes the CSV."""
    options = options_of(__doc__, "plan", modes="measure the memory modes here")
    path, key = RESULTS / "plan.csv", COLUMNS[:2]
    order = [(row["case"], row["variant"]) for row in records_of(path)]
    rows_of = measured_now if options.modes else measured_before
    on_cpu = [network for network, (_, _, batch, _) in NETWORKS.items() if batch]
    for network in on_cpu if options.modes else NETWORKS:
        if any(text in network for text in options.only):
            rows = list(rows_of(network, options))
            if rows and not options.quick:
                put(path, rows, key, order)


if __name__ == "__main__":
    main()
