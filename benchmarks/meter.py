"""What a metered step costs (``optimizer.meter``), beside the same step without.

    python benchmarks/meter.py                  # CPU, with 1 thread and with all
    python benchmarks/meter.py --device cuda
    python benchmarks/meter.py --quick          # does it run? a hundredth of each size

"off" is a step between two metered ones, "plain" one of an optimizer that was never metered: they
run the same kernels. Writes one CSV row per variant.
"""

from __future__ import annotations

import torch
from harness import Clock, Row, measure, rows_of
from routes import Ours
from step import Results, options_of, tensors_of
from workloads import Case

_TENSORS = {"cpu": ("64M", "resnet50", "2000x500"), "cuda": ("1B", "resnet50", "2000x64K")}


def run(case: Case, device: torch.device, repeats: int) -> list[Row]:
    weights, gradients = tensors_of(case, device)
    routes = {name: Ours(case, weights, gradients) for name in ("plain", "off", "metered", "bits")}
    routes["off"].optimizer.meter(every=2**30, history=1)
    routes["off"]()  # the first one is metered
    routes["metered"].optimizer.meter(every=1, history=1)
    routes["bits"].optimizer.meter(every=1, history=1, changed_bits=True)
    return rows_of(
        device,
        measure(Clock(device), routes, repeats),
        params=case.params,
        case=case.name,
        optimizer=case.optimizer,
        dtype=case.precision,
        does=case.does,
    )


def main() -> None:
    """Runs the cases and writes the CSV."""
    options = options_of(__doc__, "meter")
    results = Results(options)
    for tensors in _TENSORS[options.device.type]:
        for optimizer, precision in (("AdamW", "bf16"), ("AdamW", "fp16"), ("SGD", "bf16")):
            case = Case(optimizer, tensors, precision, quick=options.quick)
            for threads in options.threads if results.want(case.name) else ():
                torch.set_num_threads(threads)
                results.add(run(case, options.device, options.repeats))
    results.finish()


if __name__ == "__main__":
    main()
