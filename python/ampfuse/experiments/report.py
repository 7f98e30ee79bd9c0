"""What the trainers print: a heading, a line per run, and a table of all runs at the end."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from ampfuse.devices import device_name
from ampfuse.experiments.config import DESCRIPTIONS, RunConfig

if TYPE_CHECKING:
    from ampfuse.experiments.cli import Trainer

Result = dict[str, Any]


def heading(
    trainer: Trainer, configs: Sequence[RunConfig], device: torch.device, processes: int
) -> str:
    first = configs[0]
    length = _count(first.iterations, "iteration") or _count(first.epochs, "epoch")
    where = device_name(device) + (f", {processes} processes" if processes > 1 else "")
    methods = ", ".join(dict.fromkeys(config.method for config in configs))
    return (
        f"{trainer.title}\n"
        f"{first.model} on {first.data}, batch {first.batch_size}, {length}, "
        f"{first.optimizer} at {first.lr:g}; {methods}; {first.loop} loop.\n"
        f"On {where}, torch {torch.__version__}."
    )


def _count(number: int | None, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}" if number else ""


def line(result: Result) -> str:
    """One run in one line."""
    name = f"{result['model']} {result['method']}"
    if result["diverged"]:
        why = result["diverged"]
        first = f" First: {why['first']}." if why["first"] else ""
        norm = why["batch_norm_dtype"]
        norms = f" Batch norm statistics: {norm}." if norm else ""
        return (
            f"{name} diverged in step {why['step']}: {why['reason']}.{first}{norms} "
            f"Loss scale: {why['loss_scale']:g}.\n  What to do: {why['suggestion']}."
        )
    return f"{name}: " + ", ".join(_figures(result))


def _figures(result: Result) -> list[str]:
    speed = result["images_per_s"]
    figures = []
    if speed:
        figures.append(
            f"{_rate(speed['mean'])} images/s ({_rate(speed['min'])} to {_rate(speed['max'])})"
        )
    if result["train_loss"]["last"] is not None:
        figures.append(f"loss {result['train_loss']['last']:.4f}")
    test = result["test"]
    if test:
        figures.append(f"test loss {test['loss']:.4f}")
        if test["accuracy"] is not None:
            figures.append(f"test accuracy {test['accuracy']:.1%}")
    if result["skipped_steps"]:
        figures.append(_count(result["skipped_steps"], "step") + " skipped")
    return figures


def table(results: Sequence[Result]) -> str:
    """All runs, the repeats of an arm together: means, and standard deviations of several."""
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    grid.add_column("method", no_wrap=True)
    for name in (
        "step\nms",
        "speed\nimages/s",
        "against\nfp32",
        f"memory\nMB{'*' * _is_rss(results)}",
        "train\nloss",
        "accuracy\n%",
        "steps\nskipped",
        "final\nscale",
    ):
        grid.add_column(name, justify="right", no_wrap=True)
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result["method"], []).append(result)
    base = _step_ms(groups.get("fp32") or groups.get("FP32") or [])
    for method, runs in groups.items():
        sound = [run for run in runs if not run["diverged"]]
        if not sound:
            grid.add_row(method, "diverged", *[""] * 7)
            continue
        ms = _step_ms(sound)
        grid.add_row(
            method,
            _spread(sound, lambda r: r["step_time_ms"] and r["step_time_ms"]["mean"], "{:,.1f}"),
            _spread(sound, lambda r: r["images_per_s"] and r["images_per_s"]["mean"], _rate),
            f"{base / ms:.2f}x" if base and ms else "",
            _spread(sound, lambda r: r["memory_bytes"] / 1e6, "{:,.0f}"),
            _spread(sound, lambda r: r["train_loss"]["last"], "{:.3f}"),
            _spread(sound, _accuracy, "{:.1f}"),
            f"{statistics.fmean(run['skipped_steps'] for run in sound):g}",
            f"{sound[-1]['loss_scale']:,.0f}",
        )
    text = io.StringIO()
    Console(file=text, width=110, force_jupyter=False).print(grid)
    notes = [f"{method}: {_meaning(runs[0])}" for method, runs in groups.items()]
    if _is_rss(results):
        notes.append("* resident memory of the process, with Python, libraries and data")
    return text.getvalue() + "\n".join(notes)


def closing_lines(results: Sequence[Result]) -> str:
    """The two lines that the scripts of E5 ended with, for each run."""
    lines = []
    for result in results:
        if result["diverged"]:
            continue
        if len(results) > 1:
            lines.append(f"{result['method']}:")
        lines.append(f"Total execution time = {result['train_time_s']:.3f} sec")
        lines.append(f"Max memory used by tensors = {result['memory_bytes']} bytes")
    return "\n".join(lines)


def _meaning(result: Result) -> str:
    meaning = DESCRIPTIONS[result["arm"]]
    policy = result["policy"]
    if policy and result["method"] != result["arm"]:
        meaning = f"{result['arm']} ({meaning}), loss scale {policy['loss_scale']}"
    return meaning + (", the published loop" if result["loop"] == "original" else "")


def _is_rss(results: Sequence[Result]) -> bool:
    return any(result["memory_kind"] == "process RSS" for result in results)


def _accuracy(result: Result) -> float | None:
    test = result["test"]
    return 100 * test["accuracy"] if test and test["accuracy"] is not None else None


def _step_ms(runs: Sequence[Result]) -> float | None:
    times = [run["step_time_ms"]["mean"] for run in runs if run["step_time_ms"]]
    return statistics.fmean(times) if times else None


def _rate(value: float) -> str:
    """Images per second: whole ones, but at least two digits of small numbers."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _spread(
    runs: Sequence[Result],
    of: Callable[[Result], float | None],
    form: str | Callable[[float], str],
) -> str:
    values = [value for run in runs if (value := of(run)) is not None]
    if not values:
        return ""
    write = form.format if isinstance(form, str) else form
    mean = write(statistics.fmean(values))
    return mean + (f" ± {write(statistics.stdev(values))}" if len(values) > 1 else "")
