"""Prints docs/benchmarks.md's table of training steps from CSVs that ``make_table --csv`` wrote.

python benchmarks/experiments_table.py benchmarks/results/experiments_e*_cpu.csv
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

_HEADER = (
    "| experiment | batch | FP32, ms | torch.amp BF16, ms | O5, ms "
    "| O5 against FP32 | against torch.amp | memory, MB: FP32 | torch.amp | O5 |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)
_NAMES = {
    "vgg16": "VGG16, 32x32 (E1)",
    "wrn28_10": "WRN-28-10, 32x32 (E2)",
    "resnet18": "ResNet-18, 224x224 (E4)",
    "mlp": "MLP (E5)",
}

Row = dict[str, str]


def step_ms(row: Row) -> tuple[float, float]:
    """Mean milliseconds of a training step, and the standard deviation of the repeats' means."""
    steps = int(row["iterations"])
    return 1e3 * float(row["time_s_mean"]) / steps, 1e3 * float(row["time_s_std"] or 0) / steps


def line(rows: Sequence[Row]) -> str:
    """The table's line for one model and batch size."""
    by_method = {row["method"]: row for row in rows}
    fp32, amp, ours = (by_method[name] for name in ("fp32", "amp-bf16", "O5"))
    times = [step_ms(row) for row in (fp32, amp, ours)]
    memory = [f"{float(row['memory_mb_mean']):,.0f}" for row in (fp32, amp, ours)]
    cells = [
        _NAMES.get(ours["model"], ours["model"]),
        ours["batch_size"],
        *(f"{mean:.0f} ± {std:.0f}" for mean, std in times),
        *(f"**{mean / times[2][0]:.1f}x**" for mean, _ in times[:2]),
        *memory,
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Prints the table and the conditions it was measured under."""
    rows: list[Row] = []
    for name in sys.argv[1:]:
        with open(Path(name), newline="") as file:
            rows += csv.DictReader(file)
    rows.sort(key=lambda row: (row["recipe"], row["model"], int(row["batch_size"])))
    print(_HEADER)
    for _, group in groupby(rows, key=lambda row: (row["model"], row["batch_size"])):
        print(line(list(group)))
    row = rows[0]
    print(
        f"\n{row['device']}, torch {row['torch']}, ampfuse {row['ampfuse']}, {row['date'][:10]}. "
        f"Mean and standard deviation of {row['n']} runs; memory is the process's."
    )


if __name__ == "__main__":
    main()
