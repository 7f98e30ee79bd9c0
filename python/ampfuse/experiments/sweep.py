"""A command's runs, one after the other: data, training, result files, and the table at the end."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ampfuse.command_line import UsageError, check_writable
from ampfuse.devices import choose_device, device_name
from ampfuse.experiments import make_table
from ampfuse.experiments.data import Data, open_data
from ampfuse.experiments.distributed import World
from ampfuse.experiments.results import Result, Row, file_name, rows_of
from ampfuse.experiments.run import (
    Diverged,
    Interrupted,
    Place,
    Run,
    load_checkpoint,
    position,
    run_name,
)
from ampfuse.experiments.settings import ARMS, Script, Settings, parse, runs_of
from ampfuse.files import atomic

# What the scripts import, and the packages it comes in.
_NEEDED = {"torchvision": "torchvision", "timm": "timm", "tqdm": "tqdm"}
# Exit statuses besides 0: 2 is what argparse uses, 128 + signal what shells report.
_MISSING, _WRONG_USE, _DIVERGED = 1, 2, 3


Train = Callable[[Run], None]
DataOf = Callable[[Settings, torch.device, int, int], Data]


def main(
    script: Script,
    train: Train,
    argv: Sequence[str] | None = None,
    prog: str | None = None,
    data_of: DataOf = open_data,
) -> int:
    """Train what `argv` (default: ``sys.argv``) asks for and return the exit status, which
    docs/experiments.md explains. What the user has to put right ends in one line and status 2."""
    argv = sys.argv[1:] if argv is None else list(argv)
    command = [Path(sys.executable).name, "-m", f"ampfuse.experiments.{script.name}", *argv]
    args = parse(script, argv, prog or f"python -m ampfuse.experiments.{script.name}")
    needed = {**_NEEDED, **({"sklearn": "scikit-learn"} if args.data == "digits" else {})}
    if missing := [needed[name] for name in needed if importlib.util.find_spec(name) is None]:
        install = "pip install 'ampfuse[experiments]'"
        print(f"{script.name}: {', '.join(missing)} missing: {install}", file=sys.stderr)
        return _MISSING
    try:
        return _sweep(script, train, args, command, data_of)
    except (UsageError, OSError) as error:
        print(f"{script.name}: error: {error}", file=sys.stderr)
        return _WRONG_USE


def _sweep(
    script: Script, train: Train, args: argparse.Namespace, command: list[str], data_of: DataOf
) -> int:
    world = World.of_environment()
    if world.size > 1 and not script.distributed:
        raise UsageError(f"{script.name} trains in one process; imagenet takes torchrun's")
    by_rank = world.size > 1 and args.device in ("auto", "cuda") and torch.cuda.is_available()
    device = choose_device(f"cuda:{world.local_rank}" if by_rank else args.device)
    resume = load_checkpoint(args.resume) if args.resume else None
    todo, note = runs_of(args, script, device)
    label = file_name(args.GPU or device_name(device))
    place = Place(device, world, args.output / label, label, checkpoints=bool(args.checkpoints))
    place.profile, place.quiet = args.prof > 0, bool(args.quiet)
    check_writable("--output", place.folder)
    todo = todo[position(todo, resume, world) :]
    say = print if world.is_main else lambda text: None
    say("\n".join(filter(None, [heading(script, todo, device, world.size), note])))
    results: list[Result] = []
    with world.connected(device), _signals_in(place.wish):
        try:
            for result in train_all(todo, place, train, resume, data_of):
                results.append(result)
                say(line(result))
        except Interrupted as stop:
            words = [word for word in command if word not in ("--resume", str(args.resume))]
            go_on = shlex.join([*words, "--resume", str(stop.checkpoint)])
            say(f"\nStopped after step {stop.step} and saved. To go on:\n  {go_on}")
            say(table(results) if results else "")
            return 128 + (place.wish or [signal.SIGTERM])[0]
    say(f"{table(results)}\nResults: {place.folder.absolute()}")
    return _DIVERGED if any(result["diverged"] for result in results) else 0


def train_all(
    todo: Sequence[Settings],
    place: Place,
    train: Train,
    resume: dict[str, Any] | None = None,
    data_of: DataOf = open_data,
) -> Iterator[Result]:
    """Train `todo`, the first of it from `resume`; its result files are written."""
    for of in todo:
        name = resume["name"] if resume else place.world.gather(run_name(of))[0]
        data = data_of(of, place.device, place.world.rank, place.world.size)
        run, diverged = Run(of, data, place, name, resume), None
        with contextlib.closing(data), contextlib.closing(run):
            try:
                train(run)
            except Diverged as error:
                diverged = error
            result = run.result(diverged)
        resume = None
        if place.folder and place.world.is_main:
            with atomic(place.folder / f"{name}.json") as file:
                file.write(json.dumps(result, indent=1, allow_nan=False).encode() + b"\n")
            if not place.checkpoints:
                (place.folder / f"{name}.pt").unlink(missing_ok=True)  # it has served
        yield result


@contextlib.contextmanager
def _signals_in(wish: list[int]) -> Iterator[None]:
    """Take Ctrl-C and SIGTERM as wishes, which the loop reads between two steps so that it can save
    first. A second Ctrl-C ends it."""

    def note(number: int, frame: object) -> None:
        if wish and number == signal.SIGINT:
            raise KeyboardInterrupt
        wish.append(number)

    before = {}
    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        before = {n: signal.signal(n, note) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
        f"{first.optimizer} at {first.lr:g}; {methods}; {first.loop} loop.\n"
        f"On {where}, torch {torch.__version__}."
    )


def line(result: Result) -> str:
    """One run in one line; of E5 also the two that its scripts ended with."""
    name = f"{result['model']} {result['method']} batch {result['batch_size']}"
    if why := result["diverged"]:
        return (
            f"{name} diverged in step {why['step']}: {why['reason']}. Loss scale: "
            f"{result['loss_scale']:g}.\n  What to do: {why['suggestion']}.\n"
            "  Which tensor was the first: amp.explain_overflow(model) around the step says it."
        )
    text = f"{name}: " + ", ".join(t.format(result[n]) for n, t in _FIGURES.items() if result[n])
    if result["recipe"] == "e5" and result["time_s"]:
        text += f"\nTotal execution time = {result['time_s']:.3f} sec"
        text += f"\nMax memory used by tensors = {round(result['memory_mb'] * 1e6)} bytes"
    return text


_FIGURES = {"images_per_s": "{:,.1f} images/s", "loss_last": "loss {:.4f}"}
_FIGURES |= {"test_loss": "test loss {:.4f}", "accuracy_pct": "test accuracy {:.1f}%"}
_FIGURES |= {"skipped_steps": "{} steps skipped"}
_COLUMNS = ("method", "batch size", "step, ms", "images/s", "memory, MB", "loss last")
_COLUMNS += ("accuracy, %", "skipped", "scale", "outcome")


def table(found: Sequence[Result]) -> str:
    """All runs, the repeats of an arm together: means, and standard deviations of several."""
    rows = rows_of(found)
    meanings = {f"{row.method}: {_meaning(row)}": None for row in rows}
    return "\n".join(["", make_table.table(rows, _COLUMNS), "", *meanings])


def _meaning(row: Row) -> str:
    of = row.conditions
    meaning = ARMS[row.arm]
    if row.method != row.arm and of["loss_scale"]:
        meaning = f"{row.arm} ({meaning}), loss scale {of['loss_scale']}"
    meaning += ", fused batch norm" if of["fuse_batchnorm"] else ""
    return meaning + (", the published loop" if of["loop"] == "original" else "")
