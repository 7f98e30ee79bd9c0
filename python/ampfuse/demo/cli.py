"""Train a small convolutional network on scikit-learn's handwritten digits at each level from O0
to O5, on the GPU if there is one and else on the CPU, and compare time, memory and accuracy. Prints
a table; writes the rows as CSV and the plots as PNG."""

# The module's docstring is the text of `ampfuse demo --help`. Nothing heavy is imported up here.
from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ampfuse.command_line import at_least, check_writable

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from ampfuse.demo.data import Digits
    from ampfuse.demo.train import Run, Settings

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--levels",
        type=_levels,
        default=LEVELS,
        metavar="O0,O2",
        help="which, in which order, separated by commas (default: all six)",
    )
    add("--epochs", type=at_least(1), default=12, metavar="N", help="default: %(default)s")
    add("--batch-size", type=at_least(2), default=128, metavar="N", help="default: %(default)s")
    add(
        "--width",
        type=at_least(1),
        metavar="N",
        help="channels of the first layers (default: 128 on GPUs and CPUs with BF16, else 64)",
    )
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    add(
        "--contiguous",
        action="store_true",
        help="keep torch's default memory layout; channels-last is faster nearly everywhere",
    )
    add(
        "-o",
        "--output",
        type=Path,
        default=Path("ampfuse-demo"),
        metavar="DIR",
        help="folder for CSV and PNG files (default: ./%(default)s)",
    )
    add("--no-plots", action="store_true", help="write the CSV files only")


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Do what `args` say and return the exit status; wrong ones end in ``parser.error``."""
    extras = {"sklearn": "scikit-learn", "rich": "rich"}
    if not args.no_plots:
        extras["matplotlib"] = "matplotlib"
    if missing := [extras[name] for name in extras if importlib.util.find_spec(name) is None]:
        needs = " and ".join(missing)
        print(f"ampfuse demo: {needs} missing: pip install ampfuse[demo]", file=sys.stderr)
        return 1
    check_writable("--output", args.output)

    from rich.console import Console

    from ampfuse.demo import report
    from ampfuse.demo.data import load_digits
    from ampfuse.demo.train import Settings
    from ampfuse.devices import choose_device

    device = choose_device(args.device)
    digits = load_digits(device)
    if args.batch_size > len(digits.train_images):
        parser.error(
            f"argument --batch-size: {args.batch_size} is more than the "
            f"{len(digits.train_images)} training images"
        )
    settings = Settings(
        device=device,
        epochs=args.epochs,
        batch_size=args.batch_size,
        width=args.width or _default_width(device),
        seed=args.seed,
        channels_last=not args.contiguous,
    )
    console = Console()
    console.print(report.heading(settings, digits), markup=False, highlight=False)
    runs = _train_all(console, args.levels, digits, settings)
    console.print(report.table(runs, settings))
    written = report.save(runs, settings, args.output, plots=not args.no_plots)
    console.print(report.whereabouts(written), markup=False, highlight=False, soft_wrap=True)
    return 0


def _train_all(
    console: Console, levels: Sequence[str], digits: Digits, settings: Settings
) -> list[Run]:
    from rich import progress

    from ampfuse.demo.train import train

    steps = settings.epochs * settings.steps_per_epoch(digits)
    runs = []
    # Four redraws a second: more would take time from the training they report on.
    with progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("steps"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[note]}"),
        console=console,
        refresh_per_second=4,
    ) as bars:
        tasks = {level: bars.add_task(level, total=steps, start=False, note="") for level in levels}
        for level, task in tasks.items():
            bars.start_task(task)
            runs.append(
                train(
                    level,
                    digits,
                    settings,
                    on_step=lambda task=task: bars.advance(task),
                    on_epoch=lambda accuracy, task=task: bars.update(
                        task, note=f"test accuracy {accuracy:.1%}"
                    ),
                )
            )
    return runs


def _levels(text: str) -> tuple[str, ...]:
    levels = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for level in levels:
        if level not in LEVELS:
            raise argparse.ArgumentTypeError(
                f"unknown level {level!r}: the levels are {', '.join(LEVELS)} "
                "(the letter O, then a digit)"
            )
    return levels


def _default_width(device: torch.device) -> int:
    """Wide enough to show what half precision gains, where it does; else quick on any laptop."""
    from ampfuse import hardware

    return 128 if device.type == "cuda" or hardware.cpu_has_bf16() else 64
