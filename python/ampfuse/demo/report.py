"""What the demo prints and writes: heading, table with its notes, CSV files, plots."""

from __future__ import annotations

import csv
import datetime
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

import ampfuse
from ampfuse import hardware
from ampfuse.amp.policy import LEVELS
from ampfuse.demo.data import Digits
from ampfuse.demo.model import DigitsNet
from ampfuse.demo.train import Run, Settings
from ampfuse.devices import device_name
from ampfuse.files import naming

# What a level is, in the few words a table has room for.
PRECISION = {
    "O0": "FP32",
    "O1": "FP16 autocast",
    "O2": "FP16 + masters",
    "O3": "FP16 alone",
    "O4": "BF16 autocast",
    "O5": "BF16 + masters",
}


def heading(settings: Settings, digits: Digits) -> str:
    parameters = sum(p.numel() for p in DigitsNet(settings.width).parameters())
    return (
        f"Handwritten digits: {len(digits.train_images)} images to train, "
        f"{len(digits.test_images)} to test.\n"
        f"A CNN of {parameters:,} parameters, {settings.epochs} epochs, "
        f"batches of {settings.batch_size}, seed {settings.seed}.\n"
        f"On {device_name(settings.device)}, torch {torch.__version__}.\n"
    )


def table(runs: Sequence[Run], settings: Settings) -> Group:
    """One row per level and, below, what the columns mean and what to make of them."""
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # 80 columns have to do
    for name in ("level", "precision"):
        grid.add_column(name, no_wrap=True)
    for name in (
        "time\ns",
        "speed\nimages/s",
        "memory\nMiB",
        "accuracy\n%",
        "steps\nskipped",
        "final\nscale",
    ):
        grid.add_column(name, justify="right", no_wrap=True)
    marked = bf16_is_emulated(settings.device)
    for run in runs:
        is_marked = marked and LEVELS[run.level].uses_bfloat16
        grid.add_row(
            run.level + "*" * is_marked,
            PRECISION[run.level],
            f"{run.train_seconds:.1f}",
            f"{run.images_per_second:,.0f}",
            f"{run.peak_memory_mib:,.0f}",
            f"{100 * run.test_accuracy:.1f}",
            str(run.steps_skipped),
            f"{run.final_loss_scale:,.0f}",
        )
    return Group(grid, Text("\n".join(_notes(runs, settings)), style="dim"), Text())


def bf16_is_emulated(device: torch.device) -> bool:
    """True on GPUs before sm_80 (P100, V100, T4), which have no BF16 arithmetic."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)


def _notes(runs: Sequence[Run], settings: Settings) -> Iterator[str]:
    levels = {run.level for run in runs}
    yield "time: training, less warm-up and evaluation. accuracy: after the last epoch."
    yield "memory: the most that torch's tensors took at a time, in a few steps before."
    if bf16_is_emulated(settings.device):
        major, minor = torch.cuda.get_device_capability(settings.device)
        yield f"* this GPU (sm_{major}{minor}) has no BF16 arithmetic: it is emulated, and slow."
    elif settings.device.type == "cpu":
        if levels & {"O1", "O2", "O3"}:
            yield "FP16 on a CPU shows what it does to training. What it gains takes a GPU to see."
        if levels & {"O4", "O5"} and not hardware.cpu_has_bf16():
            yield "This CPU announces no BF16 arithmetic: BF16 saves memory here, not time."
    if "O3" in levels:
        yield "O3 has no FP32 master weights: small updates round away, and it may learn worse."


def save(runs: Sequence[Run], settings: Settings, folder: Path, *, plots: bool) -> list[Path]:
    """Write CSV files, and plots if asked, into `folder`, and return their paths.

    They are made in a folder of their own and then moved, so that whatever happens in between,
    `folder` never holds half a file or half a set.
    """
    files = {
        "levels.csv": _level_rows(runs, settings),
        "steps.csv": _step_rows(runs),
        "epochs.csv": _epoch_rows(runs),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with naming(folder), tempfile.TemporaryDirectory(prefix=".made-", dir=folder) as made:
        for name, rows in files.items():
            _write_csv(Path(made, name), rows)
        if plots:
            from ampfuse.demo.plots import draw

            draw(runs, device_name(settings.device), Path(made))
        # Plots first: they are what one looks for.
        names = sorted(os.listdir(made), key=lambda name: (name.endswith(".csv"), name))
        for name in names:
            os.replace(Path(made, name), folder / name)
    return [folder / name for name in names]


def whereabouts(written: Sequence[Path]) -> str:
    names = ", ".join(path.name for path in written)
    return f"Written to {written[0].parent.absolute()}: {names}"


def _level_rows(runs: Sequence[Run], settings: Settings) -> Iterator[dict[str, object]]:
    """The table's numbers unrounded, each with the conditions it was measured under."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    for run in runs:
        yield {
            "level": run.level,
            "train_seconds": run.train_seconds,
            "images_per_second": run.images_per_second,
            "peak_memory_mib": run.peak_memory_mib,
            "test_accuracy": run.test_accuracy,
            "steps_skipped": run.steps_skipped,
            "final_loss_scale": run.final_loss_scale,
            "bf16_emulated": LEVELS[run.level].uses_bfloat16 and bf16_is_emulated(settings.device),
            "epochs": settings.epochs,
            "batch_size": settings.batch_size,
            "width": settings.width,
            "seed": settings.seed,
            "channels_last": settings.channels_last,
            "device": device_name(settings.device),
            "torch": torch.__version__,
            "ampfuse": ampfuse.__version__,
            "time": now,
        }


def _step_rows(runs: Sequence[Run]) -> Iterator[dict[str, object]]:
    for run in runs:
        columns = zip(run.step_losses, run.step_loss_scales, run.step_skipped, strict=True)
        for step, (loss, loss_scale, skipped) in enumerate(columns, start=1):
            yield {
                "level": run.level,
                "step": step,
                "train_loss": loss,
                "loss_scale": loss_scale,
                "skipped": int(skipped),
            }


def _epoch_rows(runs: Sequence[Run]) -> Iterator[dict[str, object]]:
    for run in runs:
        columns = zip(run.epoch_seconds, run.epoch_accuracies, strict=True)
        for epoch, (seconds, accuracy) in enumerate(columns, start=1):
            yield {
                "level": run.level,
                "epoch": epoch,
                "train_seconds": seconds,
                "test_accuracy": accuracy,
            }


def _write_csv(path: Path, rows: Iterable[dict[str, object]]) -> None:
    rows = list(rows)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
