"""A command's runs, one after the other: data, training, result files, and the table at the end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ampfuse.command_line import UsageError, check_installed, check_writable, status_of
from ampfuse.devices import choose_device, device_name
from ampfuse.experiments import make_table
from ampfuse.experiments.data import open_data
from ampfuse.experiments.distributed import World
from ampfuse.experiments.results import Result, Row, file_name, rows_of
from ampfuse.experiments.run import Build, Diverged, Place, Run, load_checkpoint, position, run_name
from ampfuse.experiments.settings import ARMS, Script, Settings, parse, runs_of
from ampfuse.files import atomic

_DIVERGED = 3  # the exit status; status_of has the others


def main(
    script: Script, build: Build, argv: Sequence[str] | None = None, prog: str | None = None
) -> int:
    """Train what `argv` (default: ``sys.argv``) asks for and return the exit status, which
    docs/experiments.md explains. What the user has to put right ends in one line and status 2."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse(script, argv, prog or f"python -m ampfuse.experiments.{script.name}")
    left = "the runs that were finished have their results"
    return status_of(lambda: _sweep(script, build, args), script.name, left)


def _sweep(script: Script, build: Build, args: argparse.Namespace) -> int:
    check_installed("experiments", "torchvision", "timm", "tqdm", "sklearn")
    world = World.of_environment()
    if world.size > 1 and not script.distributed:
        raise UsageError(f"{script.name} trains in one process; imagenet takes torchrun's")
    by_rank = world.size > 1 and args.device in ("auto", "cuda") and torch.cuda.is_available()
    device = choose_device(f"cuda:{world.local_rank}" if by_rank else args.device)
    resume = load_checkpoint(args.resume) if args.resume else None
    todo, note = runs_of(args, script, device)
    label = file_name(args.GPU or device_name(device))
    place = Place(device, world, args.output / label, label, checkpoints=bool(args.checkpoints))
    place.profile = args.prof > 0
    check_writable("--output", place.folder)
    todo = todo[position(todo, resume, world) :]
    say = print if world.is_main else lambda text: None
    say("\n".join(filter(None, [heading(script, todo, device, world.size), note])))
    results: list[Result] = []
    with world.connected(device):
        for result in train_all(todo, place, build, resume):
            results.append(result)
            say(line(result))
    say(f"{table(rows_of(results))}\nResults: {place.folder.absolute()}")
    return _DIVERGED if any(result["diverged"] for result in results) else 0


def train_all(
    todo: Sequence[Settings], place: Place, build: Build, resume: dict[str, Any] | None = None
) -> Iterator[Result]:
    """Train `todo`, the first of it from `resume`; its result files are written."""
    for of in todo:
        name = resume["name"] if resume else place.world.gather(run_name(of))[0]
        data = open_data(of, place.device, place.world.rank, place.world.size)
        run, diverged = Run(of, data, place, name, resume), None
        try:
            run.train(build)
        except Diverged as error:
            diverged = error
        result, resume = run.result(diverged), None
        if place.folder and place.world.is_main:
            with atomic(place.folder / f"{name}.json") as file:
                file.write(json.dumps(result, indent=1, allow_nan=False).encode() + b"\n")
        yield result


# ---- what is printed -----------------------------------------------------------------------------


def heading(script: Script, todo: Sequence[Settings], device: torch.device, processes: int) -> str:
    first = todo[0]
    length = f"{first.iterations} iterations" if first.iterations else f"{first.epochs} epochs"
    where = device_name(device) + (f", {processes} processes" if processes > 1 else "")
    methods = ", ".join(dict.fromkeys(one.method for one in todo))
    batches = ", ".join(dict.fromkeys(str(one.batch_size) for one in todo))
    return (
        f"{script.title}\n"
        f"{first.model} on {first.data}, batch {batches}, {length}, "
        f"{first.optimizer} at {first.lr:g}; {methods}.\n"
        f"On {where}, torch {torch.__version__}."
    )


def line(result: Result) -> str:
    """One run in one line."""
    name = f"{result['model']} {result['method']} batch {result['batch_size']}"
    if why := result["diverged"]:
        return (
            f"{name} diverged in step {why['step']}: {why['reason']}. Loss scale: "
            f"{result['loss_scale']:g}.\n  What to do: {why['suggestion']}.\n"
            "  Which tensor was the first: amp.explain_overflow(model) around the step says it."
        )
    return f"{name}: " + ", ".join(t.format(result[n]) for n, t in _FIGURES.items() if result[n])


_FIGURES = {"images_per_s": "{:,.1f} images/s", "loss_last": "loss {:.4f}"}
_FIGURES |= {"test_loss": "test loss {:.4f}", "accuracy_pct": "test accuracy {:.1f}%"}
_FIGURES |= {"skipped_steps": "{} steps skipped"}
_COLUMNS = ("method", "batch size", "step, ms", "images/s", "memory, MB", "loss last")
_COLUMNS += ("accuracy, %", "skipped", "scale", "outcome")


def table(rows: Sequence[Row], columns: Sequence[str] = _COLUMNS) -> str:
    """The `rows` of a command, and what their methods mean."""
    meanings = {f"{row['method']}: {ARMS[row['conditions']['arm']]}": None for row in rows}
    return "\n".join(["", make_table.table(rows, columns), "", *meanings])
