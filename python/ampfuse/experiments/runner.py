"""A command's runs, one after the other: data, training, result files, and the table at the end."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ampfuse.devices import choose_device, device_name
from ampfuse.experiments import checkpoint, diagnose, report, signals
from ampfuse.experiments.config import RunConfig, UsageError
from ampfuse.experiments.distributed import PeerLost, World
from ampfuse.experiments.record import RunResult, check_writable, file_name, run_name
from ampfuse.experiments.resolve import FUSED, resolve
from ampfuse.experiments.run_log import RunLog
from ampfuse.experiments.tasks import TASKS
from ampfuse.experiments.training import Diverged, Interrupted, Place, Training

if TYPE_CHECKING:
    from ampfuse.experiments.data import Data
    from ampfuse.experiments.recipes import Trainer

# Exit statuses besides 0: 2 is what argparse uses, 128 + signal what shells report.
_WRONG_USE, _DIVERGED, _PEER_LOST = 2, 3, 4

Say = Callable[[str], None]


def run_command(trainer: Trainer, args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Do what `args`, parsed from `argv`, say and return the exit status (docs/experiments.md)."""
    world = World.of_environment()
    try:
        return _run_command(trainer, args, argv, world)
    except (UsageError, PeerLost) as error:
        is_usage = isinstance(error, UsageError)
        if world.is_main or not is_usage:
            print(f"{trainer.name}: error: {error}", file=sys.stderr)
        return _WRONG_USE if is_usage else _PEER_LOST
    finally:
        world.close()


def _run_command(
    trainer: Trainer, args: argparse.Namespace, argv: Sequence[str], world: World
) -> int:
    device = _device(args.device, world)
    resume = checkpoint.load(args.resume) if args.resume else None
    if resume and resume.config.arm in FUSED and args.fuse_batchnorm is None:
        args.fuse_batchnorm = resume.config.fuse_batchnorm  # earlier versions did not
    configs, notes = resolve(args, trainer, device)
    if world.size > 1 and args.graph:
        raise UsageError("--graph: capture under torchrun is not supported; leave it out")
    folder = args.output / file_name(args.GPU or device_name(device))
    check_writable("--output", folder)
    position = _position(configs, resume)
    command = [Path(sys.executable).name, "-m", f"ampfuse.experiments.{trainer.name}", *argv]
    say: Say = print if world.is_main else lambda text: None
    with signals.listening() as wish:
        world.connect(device)
        place = Place(
            device,
            world,
            folder,
            wish,
            profile_steps=max(0, args.prof),
            save_epochs=args.checkpoints,
            command=command,
        )
        say(report.heading(trainer, configs, device, world.size))
        for note in notes:
            say(note)
        several = len({config.batch_size for config in configs}) > 1
        results: list[RunResult] = []
        try:
            for result in _train_all(configs[position:], resume, place, args, say):
                results.append(result)
                say(report.line(result, of_several_batches=several))
        except Interrupted as stop:
            if stop.checkpoint:
                resume_line = _resume_command(command, stop.checkpoint)
                say(f"\nStopped after step {stop.step} and saved. To go on:\n  {resume_line}")
            if results:
                say(report.table(results))
            return 128 + stop.signal_number
    say(report.table(results))
    say(f"Results: {folder.absolute()}")
    if trainer.closing_lines:
        say(report.closing_lines(results))
    return _DIVERGED if any(result.diverged for result in results) else 0


def _train_all(
    configs: Sequence[RunConfig],
    resume: checkpoint.Checkpoint | None,
    place: Place,
    args: argparse.Namespace,
    say: Say,
) -> Iterator[RunResult]:
    """Train `configs`, the first of them from `resume`; their result files are written."""
    for _, group in itertools.groupby(configs, key=_data_settings):
        alike = list(group)
        task = TASKS[alike[0].experiment]
        with contextlib.closing(task.open_data(alike[0], place.device, place.world)) as data:
            for config in alike:
                data.reseed(config.seed + config.repeat)
                yield _train_one(config, data, place, resume, args, say)
                resume = None


def _data_settings(config: RunConfig) -> tuple[Any, ...]:
    """What two runs that share their data have in common."""
    names = ("data", "batch_size", "image_size", "loader", "workers", "augment", "shuffle", "mean")
    names += ("std", "channels_last", "seed", "synthetic_size")
    return tuple(getattr(config, name) for name in names)


def _train_one(
    config: RunConfig,
    data: Data,
    place: Place,
    resume: checkpoint.Checkpoint | None,
    args: argparse.Namespace,
    say: Say,
) -> RunResult:
    name = resume.name if resume else run_name(config)
    with contextlib.closing(_run_log(config, place, name, args)) as log:
        training = Training(config, data, place, name, resume, log)
        try:
            result = training.run()
        except Diverged as error:
            say(f"{config.title}: diverged; training again up to step {error.step} to see where")
            diverged = diagnose.explain(training, error)
            result = dataclasses.replace(training.result(), diverged=diverged)
    if training.files:
        result.write(training.files / f"{name}.json")
    if training.checkpoint_path and not args.checkpoints:
        training.checkpoint_path.unlink(missing_ok=True)  # it has served
    return result


def _run_log(config: RunConfig, place: Place, name: str, args: argparse.Namespace) -> RunLog:
    if not place.world.is_main or place.folder is None:
        return RunLog()
    return RunLog(
        place.folder / f"{name}.jsonl",
        title=None if args.quiet else config.title,
        tensorboard=place.folder / "tensorboard" / name if args.tensorboard else None,
    )


def _device(name: str, world: World) -> torch.device:
    if world.size > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
        name = f"cuda:{world.local_rank}"
    try:
        return choose_device(name)
    except ValueError as error:
        raise UsageError(f"--device: {error}") from None


def _position(configs: Sequence[RunConfig], resume: checkpoint.Checkpoint | None) -> int:
    """Which run a checkpoint belongs to. Those before it are done. It may be made longer."""
    if resume is None:
        return 0
    free = {"epochs", "iterations", "repeats", "print_freq", "evaluate", "workers"}
    names = [field.name for field in dataclasses.fields(RunConfig) if field.name not in free]
    then = resume.config
    differences = [
        [
            f"{n} {getattr(then, n)!r} then and {getattr(now, n)!r} now"
            for n in names
            if getattr(then, n) != getattr(now, n)
        ]
        for now in configs
    ]
    nearest = min(differences, key=len)
    if nearest:
        raise UsageError(f"--resume: the checkpoint is of another run ({', '.join(nearest)})")
    return differences.index(nearest)


def _resume_command(command: Sequence[str], path: Path) -> str:
    words = list(command)
    while "--resume" in words:
        at = words.index("--resume")
        del words[at : at + 2]
    return shlex.join([*words, "--resume", str(path)])
