"""What the trainers print: a heading, a line per run, and a table of all runs at the end."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ampfuse.devices import device_name
from ampfuse.experiments.config import DESCRIPTIONS, RunConfig
from ampfuse.experiments.record import RunResult
from ampfuse.experiments.results import Stat

if TYPE_CHECKING:
    from ampfuse.experiments.recipes import Trainer


def heading(
    trainer: Trainer, configs: Sequence[RunConfig], device: torch.device, processes: int
) -> str:
    first = configs[0]
    length = _count(first.iterations, "iteration") or _count(first.epochs, "epoch")
    where = device_name(device) + (f", {processes} processes" if processes > 1 else "")
    methods = ", ".join(dict.fromkeys(config.method for config in configs))
    batches = ", ".join(dict.fromkeys(str(config.batch_size) for config in configs))
    return (
        f"{trainer.title}\n"
        f"{first.model} on {first.data}, batch {batches}, {length}, "
        f"{first.optimizer} at {first.lr:g}; {methods}; {first.loop} loop.\n"
        f"On {where}, torch {torch.__version__}."
    )


def _count(number: int | None, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}" if number else ""


def line(result: RunResult, *, of_several_batches: bool = False) -> str:
    """One run in one line, with its batch size if there are several."""
    name = f"{result.model} {result.method}"
    name += f" batch {result.batch_size}" if of_several_batches else ""
    if why := result.diverged:
        first = f" First: {why['first']}." if why["first"] else ""
        norm = why["batch_norm_dtype"]
        norms = f" Batch norm statistics: {norm}." if norm else ""
        return (
            f"{name} diverged in step {why['step']}: {why['reason']}.{first}{norms} "
            f"Loss scale: {why['loss_scale']:g}.\n  What to do: {why['suggestion']}."
        )
    figures = []
    if speed := result.images_per_s:
        mean, low, high = (_rate(speed[name]) for name in ("mean", "min", "max"))
        figures.append(f"{mean} images/s ({low} to {high})")
    if (last := result.figure("train_loss", "last")) is not None:
        figures.append(f"loss {last:.4f}")
    if result.test:
        figures.append(f"test loss {result.test['loss']:.4f}")
    if result.accuracy_pct is not None:
        figures.append(f"test accuracy {result.accuracy_pct:.1f}%")
    if result.skipped_steps:
        figures.append(_count(result.skipped_steps, "step") + " skipped")
    return f"{name}: " + ", ".join(figures)


def table(results: Sequence[RunResult]) -> str:
    """All runs, the repeats of an arm together: means, and standard deviations of several."""
    several = len({result.batch_size for result in results}) > 1
    is_rss = any(result.memory_kind == "process RSS" for result in results)
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    names = "method|batch_size" if several else "method"
    names += f"|step_ms|speed_images/s|against_fp32|memory_MB{'*' * is_rss}|train_loss|accuracy_%"
    for name in f"{names}|steps_skipped|final_scale".split("|"):
        justify = "left" if name == "method" else "right"
        grid.add_column(name.replace("_", "\n"), justify=justify, no_wrap=True)
    groups: dict[tuple[int, str], list[RunResult]] = {}
    for result in results:
        groups.setdefault((result.batch_size, result.method), []).append(result)
    for (batch, method), runs in groups.items():
        head = [method, str(batch)] if several else [method]
        sound = [run for run in runs if not run.diverged]
        if not sound:
            grid.add_row(*head, "diverged")
            continue
        ms = _step_ms(sound)
        base = _step_ms(groups.get((batch, "fp32")) or groups.get((batch, "FP32")) or [])
        grid.add_row(
            *head,
            _spread(ms, "{:,.1f}".format),
            _spread(Stat.of(run.figure("images_per_s", "mean") for run in sound), _rate),
            f"{base.mean / ms.mean:.2f}x" if base and ms else "",
            _spread(Stat.of((run.memory_bytes or 0) / 1e6 for run in sound), "{:,.0f}".format),
            _spread(Stat.of(run.figure("train_loss", "last") for run in sound), "{:.3f}".format),
            _spread(Stat.of(run.accuracy_pct for run in sound), "{:.1f}".format),
            f"{statistics.fmean(run.skipped_steps for run in sound):g}",
            f"{sound[-1].loss_scale:,.0f}",
        )
    text = io.StringIO()
    Console(file=text, width=110, force_jupyter=False).print(grid)
    meanings = {method: f"{method}: {_meaning(runs[0])}" for (_, method), runs in groups.items()}
    rss = ["* resident memory of the process, with Python, libraries and data"] * is_rss
    return text.getvalue() + "\n".join([*meanings.values(), *rss])


def closing_lines(results: Sequence[RunResult]) -> str:
    """The two lines that the scripts of E5 ended with, for each run."""
    return "\n".join(
        (f"{result.method}:\n" if len(results) > 1 else "")
        + f"Total execution time = {result.train_time_s:.3f} sec\n"
        + f"Max memory used by tensors = {result.memory_bytes} bytes"
        for result in results
        if not result.diverged
    )


def _meaning(result: RunResult) -> str:
    meaning = DESCRIPTIONS[result.arm]
    if result.policy and result.method != result.arm:
        meaning = f"{result.arm} ({meaning}), loss scale {result.policy['loss_scale']}"
    if result.policy and result.policy.get("fuse_batchnorm"):
        meaning += ", fused batch norm"
    return meaning + (", the published loop" if result.loop == "original" else "")


def _step_ms(runs: Sequence[RunResult]) -> Stat | None:
    return Stat.of(run.step_time_ms and run.step_time_ms["mean"] for run in runs)


def _rate(value: float) -> str:
    """Images per second: whole ones, but at least two digits of small numbers."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _spread(stat: Stat | None, write: Callable[[float], str]) -> str:
    if stat is None:
        return ""
    return write(stat.mean) + ("" if stat.std is None else f" ± {write(stat.std)}")
