"""The table of training steps of the experiments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from .results import Record, records_of
from .tables import markdown

_NAMES = {
    "vgg16": "VGG16, 32x32 (E1)",
    "wrn28_10": "WRN-28-10, 32x32 (E2)",
    "resnet18": "ResNet-18, 224x224 (E4)",
    "mlp": "MLP (E5)",
}


def experiments_table(rows: Sequence[Record]) -> list[str]:
    """Mean milliseconds of a training step and the standard deviation of the repeats' means."""
    columns = ["experiment", "batch", "FP32, ms", "torch.amp BF16, ms", "O5, ms"]
    columns += ["O5 against FP32", "against torch.amp", "memory, MB: FP32", "torch.amp", "O5"]
    rows = sorted(rows, key=lambda row: (row["recipe"], row["model"], int(row["batch_size"])))
    lines = []
    for (model, batch), group in groupby(rows, itemgetter("model", "batch_size")):
        by_variant = {row["variant"]: row for row in group}
        variants = [by_variant[name] for name in ("fp32", "amp-bf16", "O5")]
        means, deviations = (
            [1e3 * float(row[column] or 0) / int(row["iterations"]) for row in variants]
            for column in ("time_s_mean", "time_s_std")
        )
        times = [f"{mean:.0f} ± {std:.0f}" for mean, std in zip(means, deviations, strict=True)]
        gains = [f"**{mean / means[2]:.1f}x**" for mean in means[:2]]
        memory = [f"{float(row['memory_mb_mean']):,.0f}" for row in variants]
        lines.append([_NAMES.get(model, model), batch, *times, *gains, *memory])
    return markdown(columns, lines)


def print_experiments(paths: Sequence[Path]) -> None:
    """The table of their rows, and the conditions they were measured under."""
    rows = [row for path in paths for row in records_of(path)]
    print("\n".join(experiments_table(rows)))
    row = rows[0]
    print(
        f"\n{row['device']}, torch {row['torch']}, ampfuse {row['ampfuse']}, {row['date'][:10]}. "
        f"Mean and standard deviation of {row['n']} runs; memory is the process's."
    )
