"""The demo's plots, drawn from its runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

# Figure, not pyplot: no display is opened and no global state is touched.
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ampfuse.demo.train import Run

# Okabe and Ito's palette, told apart by colour-blind readers too; the two half precisions also
# differ in the kind of line.
_STYLE = {
    "O0": {"color": "#000000", "linestyle": "-"},
    "O1": {"color": "#E69F00", "linestyle": "--"},
    "O2": {"color": "#D55E00", "linestyle": "--"},
    "O3": {"color": "#CC79A7", "linestyle": "--"},
    "O4": {"color": "#56B4E9", "linestyle": "-."},
    "O5": {"color": "#0072B2", "linestyle": "-."},
}
_DPI = 150


def draw(runs: Sequence[Run], device: str, folder: Path) -> None:
    """Write speed.png, learning.png and loss_scale.png into `folder`; `device` goes in titles."""
    for name, figure in (
        ("speed.png", _speed(runs)),
        ("learning.png", _learning(runs)),
        ("loss_scale.png", _loss_scale(runs)),
    ):
        figure.suptitle(f"Handwritten digits on {device}", fontsize=10)
        figure.savefig(folder / name, dpi=_DPI)


def _speed(runs: Sequence[Run]) -> Figure:
    """Bars of time, throughput and memory."""
    panels = [
        ("Training time", "seconds", "{:.1f}", [r.train_seconds for r in runs]),
        ("Throughput", "images per second", "{:,.0f}", [r.images_per_second for r in runs]),
        ("Peak memory", "MiB", "{:,.0f}", [r.peak_memory_mib for r in runs]),
    ]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    all_axes = figure.subplots(1, len(panels))
    for axes, (title, unit, label, values) in zip(all_axes, panels, strict=True):
        bars = axes.bar(
            [run.level for run in runs], values, color=[_STYLE[run.level]["color"] for run in runs]
        )
        axes.bar_label(bars, fmt=label, padding=2, fontsize=8)
        axes.margins(y=0.12)  # room for the numbers on the bars
        axes.set(title=title, xlabel="level", ylabel=unit)
        _unclutter(axes, grid="y")
    return figure


def _learning(runs: Sequence[Run]) -> Figure:
    """Training loss and test accuracy over the time spent training."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    for run in runs:
        style = _STYLE[run.level]
        # The clock is read once an epoch, not to disturb the device: steps lie evenly between.
        ends = [0.0, *run.epoch_seconds]
        steps_at_ends = np.linspace(0, len(run.step_losses), len(ends))
        seconds = np.interp(np.arange(1, len(run.step_losses) + 1), steps_at_ends, ends)
        loss_axes.plot(seconds, run.step_losses, **style, linewidth=1.2, label=run.level)
        accuracy_axes.plot(
            run.epoch_seconds,
            [100 * accuracy for accuracy in run.epoch_accuracies],
            **style,
            linewidth=1.2,
            marker=".",
            label=run.level,
        )
    loss_axes.set(title="Training loss", ylabel="cross-entropy, nats", yscale="log")
    # The first epochs' guesses would squeeze the end, where the levels are told apart.
    lowest = min(100 * run.test_accuracy for run in runs)
    accuracy_axes.set(title="Test accuracy", ylabel="right answers, %")
    accuracy_axes.set_ylim(max(min(lowest - 5, 80), -1), 101)
    for axes, corner in ((loss_axes, "upper right"), (accuracy_axes, "lower right")):
        axes.set(xlabel="training time, s")
        axes.set_xlim(left=0)
        axes.legend(loc=corner, fontsize=8)
        _unclutter(axes)
    return figure


def _loss_scale(runs: Sequence[Run]) -> Figure:
    """Loss scale over steps; levels that took the same course share a line."""
    courses: dict[tuple, list[Run]] = {}
    for run in runs:
        courses.setdefault((*run.step_loss_scales, *run.step_skipped), []).append(run)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for together in courses.values():
        run = together[0]
        steps = np.arange(1, len(run.step_loss_scales) + 1)
        scales = np.asarray(run.step_loss_scales)
        label = ", ".join(run.level for run in together)
        axes.step(steps, scales, where="post", **_STYLE[run.level], linewidth=1.5, label=label)
        if any(run.step_skipped):
            skipped = np.asarray(run.step_skipped)
            axes.plot(
                steps[skipped],
                scales[skipped],
                "x",
                color=_STYLE[run.level]["color"],
                label=f"skipped ({label})",
            )
    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    axes.set_ylim(low / 2, high * 2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title="Loss scale", xlabel="step", ylabel="factor on the loss")
    axes.legend(fontsize=8)
    _unclutter(axes)
    return figure


def _unclutter(axes: Axes, grid: str = "both") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
