"""Train a small convolutional network on scikit-learn's handwritten digits at each level from O0
to O5, on the GPU if there is one and else on the CPU, and compare time, memory and accuracy. Prints
a table; writes its rows as CSV, and pictures."""

# The module's docstring is the text of `ampfuse demo --help`.
from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from pathlib import Path

import torch

from ampfuse import hardware
from ampfuse.command_line import at_least, check_installed, check_writable, run_alone
from ampfuse.devices import choose_device, device_name
from ampfuse.experiments import make_plot, make_table
from ampfuse.experiments.results import rows_of
from ampfuse.experiments.settings import LEVELS, Settings, has_tf32_and_bf16
from ampfuse.experiments.sweep import DIVERGED, train_all
from ampfuse.experiments.training import Job

_NOTES = """\
memory: the peak of tensors, measured in a few steps beforehand.
FP16 on a CPU shows its effect on training. Its speed shows on a GPU.
O3 has no FP32 master weights: small updates are lost, and it may learn worse."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    levels = "levels to train, in this order (default: all six)"
    add("--levels", nargs="+", choices=LEVELS, default=LEVELS, metavar="O0", help=levels)
    add("--epochs", type=at_least(1), default=12, metavar="N", help="default: %(default)s")
    add("--batch-size", type=at_least(2), default=128, metavar="N", help="default: %(default)s")
    width = "channels of the first layers (default: 128 on GPUs and CPUs with BF16, else 64)"
    add("--width", type=at_least(1), metavar="N", help=width)
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    folder = "folder for CSV and pictures (default: ./%(default)s)"
    add("--output", "-o", type=Path, default=Path("ampfuse-demo"), metavar="DIR", help=folder)


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Train at the levels, write the files, and return the exit status."""
    check_installed("demo", "sklearn", "matplotlib", "tqdm")
    check_writable("--output", args.output)
    device = choose_device(args.device)
    on_cpu = device.type == "cpu"
    has_bf16 = hardware.cpu_has_bf16() if on_cpu else has_tf32_and_bf16(device)
    # Wide enough to show the gain of half precision, or quick on any laptop.
    width = args.width or (64 if on_cpu and not has_bf16 else 128)
    common = Settings(
        experiment="demo",
        model=f"digits{width}",
        data="digits",
        image_size=8,
        epochs=args.epochs,
        batch_size=args.batch_size,
        seed=args.seed,
        lr=0.1,
        schedule="cosine",
        warmup=0.3,
        weight_decay=5e-4,
        growth_interval=25,  # so that the scale grows within the run
        print_freq=10,
    )
    levels = dict.fromkeys(args.levels)
    todo = [dataclasses.replace(common, precision=level, variant=level) for level in levels]
    what = f"a CNN {width} channels wide, {args.epochs} epochs, batches of {args.batch_size}"
    where = f"{device_name(device)}, torch {torch.__version__}"
    print(f"Handwritten digits; {what}, seed {args.seed}. On {where}.", flush=True)
    rows = rows_of(train_all(todo, Job(device, label=device_name(device), measure_tensors=True)))
    table = make_table.table(rows, make_table.TRAINED)
    print(f"\n{table}\n\n{make_table.explained(rows)}\n{_NOTES}")
    if not has_bf16:
        print("This device has no BF16 arithmetic: O4 and O5 save memory, not time.")
    csv = args.output / "levels.csv"
    make_table.write_csv(csv, rows)
    written = [*make_plot.save(make_plot.drawn(rows), args.output), csv]
    print(f"Written to {args.output.absolute()}: {', '.join(path.name for path in written)}")
    return DIVERGED if any(row.diverged for row in rows) else 0


main = functools.partial(run_alone, sys.modules[__name__])

if __name__ == "__main__":
    sys.exit(main())
