"""Test accuracy with batch norms fused and left as they are: three seeds on handwritten digits.

    python benchmarks/fused_accuracy.py

    demo   the demo's network, as it trains it
    wrn    E2's recipe on a Wide-ResNet-16-4 and images of 16x16, 15 epochs

Half an hour on two cores. The rows go to results/fused_accuracy.csv.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from statistics import fmean, stdev

import torch
from harness import RESULTS, hardware, write

import ampfuse
from ampfuse.experiments.demo import settings_of, train
from ampfuse.experiments.run import Place
from ampfuse.experiments.sweep import train_all

_CSV = RESULTS / "fused_accuracy.csv"
_CPU = torch.device("cpu")
_SEEDS = 3
_PLAIN = ("O0", "O1", "O2", "O4", "O5")
_FUSED = ("O1", "O2", "O4", "O5")  # where the experiments fuse
_E2 = (
    "--recipe e2 --model wrn16_4 --data digits --image-size 16 --epochs 15 --batch-size 64 "
    f"--repeats {_SEEDS} --device cpu --quiet --arm"
).split()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One training."""

    network: str
    level: str
    fused: int  # 0 or 1
    seed: int
    test_accuracy: float  # 0 to 1
    test_loss: float
    hardware: str
    torch: str
    ampfuse: str
    date: str


def demo() -> Iterator[Row]:
    """The demo's own loop, with the option."""
    arms = [(level, 0) for level in _PLAIN] + [(level, 1) for level in _FUSED]
    for seed, (level, fused) in product(range(_SEEDS), arms):
        settings = settings_of(level, 128, epochs=12, seed=seed, fuse_batchnorm=bool(fused))
        (result,) = train_all([settings], Place(_CPU, quiet=True), train)
        yield _row("demo", level, fused, seed, result["accuracy_pct"] / 100)


def wide_resnet() -> Iterator[Row]:
    """``ampfuse train cifar``, which leaves a JSON file of each run."""
    with tempfile.TemporaryDirectory() as folder:
        for fuse, levels in (("--no-fuse-batchnorm", _PLAIN), ("--fuse-batchnorm", _FUSED)):
            command = ["-m", "ampfuse", "train", "cifar", *_E2, *levels, fuse]
            subprocess.run([sys.executable, *command, "--output", folder], check=True)
        runs = [json.loads(path.read_text()) for path in sorted(Path(folder).rglob("*.json"))]
    for run in runs:
        fused = int((run["policy"] or {}).get("fuse_batchnorm", False))
        test = run["test"]
        yield _row(run["model"], run["arm"], fused, run["seed"], test["accuracy"], test["loss"])


def _row(
    network: str, level: str, fused: int, seed: int, accuracy: float, loss: float = math.nan
) -> Row:
    return Row(
        network=network,
        level=level,
        fused=fused,
        seed=seed,
        test_accuracy=round(accuracy, 5),
        test_loss=round(loss, 5),
        hardware=hardware(_CPU),
        torch=torch.__version__,
        ampfuse=ampfuse.__version__,
        date=datetime.date.today().isoformat(),
    )


def lines(rows: list[Row]) -> list[str]:
    """The table in docs/benchmarks.md."""
    found = []
    for (network, level), group in groupby(rows, lambda row: (row.network, row.level)):
        arms = [list(runs) for _, runs in groupby(group, lambda row: row.fused)]
        arms += [[]] * (2 - len(arms))
        cells = [_cell([100 * run.test_accuracy for run in runs], 1) for runs in arms]
        cells += [_cell([run.test_loss for run in runs], 3) for runs in arms]
        found.append(f"| {network} | {level} | {' | '.join(cells)} |")
    return found


def _cell(values: list[float], digits: int) -> str:
    if not values or math.isnan(values[0]):
        return ""
    return f"{fmean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def main() -> None:
    """Trains, writes the rows, prints the table."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    rows = [*demo(), *wide_resnet()]
    rows.sort(key=lambda row: (row.network, row.level, row.fused, row.seed))
    write(_CSV, rows)
    print("\n".join(lines(rows)))


if __name__ == "__main__":
    main()
