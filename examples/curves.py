"""Draws the training loss of an example in native BF16, at O5 and at O2.

    python examples/curves.py gpt --variants native O5 O2 --seeds 3

Each run is a process of its own, and a native one never imports ampfuse. The means of 100
parts of each run go into figures/NAME.csv, their curves into figures/NAME.svg.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure

from ampfuse.hardware import cpu_model

EXAMPLES = Path(__file__).parent
VARIANTS = {"native": ("native BF16", "k", 3), "O5": ("O5", "C9", 1.8), "O2": ("O2", "C1", 0.8)}


def run(name: str, variant: str, seed: int) -> np.ndarray:  # [100, 2]: step and loss
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            EXAMPLES / f"{name}.py",
            "--precision",
            variant,
            "--seed",
            str(seed),
        ]
        subprocess.run([*command, "--csv", f"{folder}/losses.csv"], check=True)
        steps = np.loadtxt(f"{folder}/losses.csv", delimiter=",", skiprows=1)
    return np.array([part.mean(0) for part in np.array_split(steps, min(100, len(steps)))])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=["gpt", "hf_finetune", "lightning_digits"])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    args = parser.parse_args(argv)

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    rows = ["precision,seed,step,loss"]
    axes = figure.subplots()
    for variant in args.variants:
        curves = np.stack([run(args.name, variant, seed) for seed in range(args.seeds)])
        for seed, curve in enumerate(curves):
            rows += [f"{variant},{seed},{step:g},{loss:.4g}" for step, loss in curve]
        steps, losses, (label, color, width) = curves[0, :, 0], curves[:, :, 1], VARIANTS[variant]
        axes.fill_between(steps, losses.min(0), losses.max(0), color=color, alpha=0.15, lw=0)
        axes.plot(steps, losses.mean(0), label=label, color=color, lw=width)
    axes.set(xlabel="step", yscale="log", title=f"{args.name}.py: training loss, not speed")
    axes.legend(title=f"mean and range of {args.seeds} seeds" if args.seeds > 1 else "one seed")
    figure.supxlabel(f"{cpu_model()}, torch {torch.__version__}", fontsize=8)
    path = EXAMPLES / "figures" / f"{args.name}.csv"
    path.write_text("\n".join(rows) + "\n")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": args.name})
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
