"""A command's runs, one after the other: data, training, result files, and the table at the end."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ampfuse.devices import choose_device, device_name
from ampfuse.experiments import checkpoint, diagnose, progress, provenance, report, signals
from ampfuse.experiments.cli import Trainer
from ampfuse.experiments.config import RunConfig, UsageError
from ampfuse.experiments.distributed import PeerLost, World
from ampfuse.experiments.files import check_writable, file_name, write_json
from ampfuse.experiments.record import run_name
from ampfuse.experiments.resolve import resolve
from ampfuse.experiments.tasks import Task
from ampfuse.experiments.training import Diverged, Interrupted, Place, Training, result_of

if TYPE_CHECKING:
    import argparse

    from ampfuse.experiments.data import Data

# Exit statuses besides 0: 2 is what argparse uses, 128 + signal what shells report.
_WRONG_USE, _DIVERGED, _PEER_LOST = 2, 3, 4


def run_command(trainer: Trainer, task: Task, args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Do what `args` say and return the exit status.

    0: done; 2: wrong use, in one line; 3: a run diverged; 4: another process was lost; 128 + n:
    ended by signal n, after saving.
    """
    world = World.of_environment()
    try:
        return _run_command(trainer, task, args, argv, world)
    except UsageError as error:
        if world.is_main:
            print(f"{trainer.name}: error: {error}", file=sys.stderr)
        return _WRONG_USE
    except PeerLost as error:
        print(f"{trainer.name}: error: {error}", file=sys.stderr)
        return _PEER_LOST
    finally:
        world.close()


def _run_command(
    trainer: Trainer, task: Task, args: argparse.Namespace, argv: Sequence[str], world: World
) -> int:
    device = _device(args.device, world)
    resume = checkpoint.load(args.resume) if args.resume else None
    configs, notes = resolve(args, trainer, device)
    if world.size > 1 and args.graph:
        raise UsageError("--graph: capture under torchrun is not supported; leave it out")
    label = file_name(args.GPU or device_name(device))
    folder = args.output / label
    check_writable("--output", folder)
    position = _position(configs, resume)
    with signals.listening() as wish:
        world.connect(device)
        place = Place(
            device,
            world,
            folder,
            wish,
            profile_steps=max(0, args.prof),
            save_epochs=args.checkpoints,
        )
        say: Callable[[str], None] = print if world.is_main else lambda text: None
        say(report.heading(trainer, configs, device, world.size))
        for note in notes:
            say(note)
        common = {
            "gpu": label,
            "device": provenance.device_facts(device),
            "world_size": world.size,
            "environment": provenance.environment(),
            "command": [
                Path(sys.executable).name,
                "-m",
                f"ampfuse.experiments.{trainer.name}",
                *argv,
            ],
        }
        return _train_all(configs, position, task, place, resume, common, args, say)


def _train_all(
    configs: Sequence[RunConfig],
    position: int,
    task: Task,
    place: Place,
    resume: checkpoint.Checkpoint | None,
    common: dict[str, Any],
    args: argparse.Namespace,
    say: Callable[[str], None],
) -> int:
    opened = _OpenData(task, place)
    results = []
    try:
        for i, config in enumerate(configs[position:], start=position):
            of_run = resume if i == position else None
            result, saved = _train_one(config, opened, place, of_run, common, args, say)
            results.append(result)
            if saved is not None and not args.checkpoints:
                saved.unlink(missing_ok=True)
    except Interrupted as stop:
        if stop.checkpoint:
            resume_line = _resume_command(common["command"], stop.checkpoint)
            say(f"\nStopped after step {stop.step} and saved. To go on:\n  {resume_line}")
        if results:
            say(report.table(results))
        return 128 + stop.signal_number
    finally:
        opened.close()
    if place.world.is_main:
        say(report.table(results))
        say(f"Results: {place.folder.absolute()}")
        if args.closing_lines:
            say(report.closing_lines(results))
    return _DIVERGED if any(result["diverged"] for result in results) else 0


def _train_one(
    config: RunConfig,
    opened: _OpenData,
    place: Place,
    resume: checkpoint.Checkpoint | None,
    common: dict[str, Any],
    args: argparse.Namespace,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], Path | None]:
    """One run and its result file. Returns the result, and the checkpoint it left, if any."""
    data = opened.get(config)
    name = resume.name if resume else run_name(config)
    with progress.observe(config, place, name, args) as observer:
        training = Training(config, opened.task, data, place, name, resume, observer)
        observer.total(training.total_steps, training.first_step)
        try:
            measured = training.run()
        except Diverged as error:
            say(f"{config.title}: diverged; training again up to step {error.step} to see where")
            measured = training.measured()
            measured["diverged"] = diagnose.explain(training, error)
    result = result_of(config, measured, data.describe(), common)
    if place.folder is not None and place.world.is_main:
        write_json(place.folder / f"{name}.json", result)
    say(report.line(result))
    return result, training.checkpoint_path


class _OpenData:
    """The data of the present run: those of the run before, in another order, if they will do."""

    def __init__(self, task: Task, place: Place) -> None:
        self.task, self._place = task, place
        self._data: Data | None = None
        self._of: tuple[Any, ...] | None = None

    def get(self, config: RunConfig) -> Data:
        of = tuple(getattr(config, name) for name in _DATA_SETTINGS)
        if self._data is None or of != self._of:
            self.close()
            self._data = self.task.open_data(config, self._place.device, self._place.world)
            self._of = of
        self._data.reseed(config.seed + config.repeat)
        return self._data

    def close(self) -> None:
        if self._data is not None:
            self._data.close()
        self._data = None


# What two runs that share their data have in common.
_DATA_SETTINGS = (
    "data",
    "batch_size",
    "image_size",
    "loader",
    "workers",
    "augment",
    "shuffle",
    "mean",
    "std",
    "channels_last",
    "seed",
    "synthetic_size",
)


def _device(name: str, world: World) -> torch.device:
    if world.size > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
        name = f"cuda:{world.local_rank}"
    try:
        return choose_device(name)
    except ValueError as error:
        raise UsageError(f"--device: {error}") from None


def _position(configs: Sequence[RunConfig], resume: checkpoint.Checkpoint | None) -> int:
    """Which run a checkpoint belongs to. Those before it are done.

    Its length, and what has no part in the numbers, may differ: a run can be made longer.
    """
    if resume is None:
        return 0
    for position, config in enumerate(configs):
        if not _differences(config, resume.config):
            return position
    nearest = min(configs, key=lambda config: len(_differences(config, resume.config)))
    differing = ", ".join(
        f"{name} {getattr(resume.config, name)!r} then and {getattr(nearest, name)!r} now"
        for name in _differences(nearest, resume.config)
    )
    raise UsageError(f"--resume: the checkpoint is of another run ({differing})")


def _differences(a: RunConfig, b: RunConfig) -> list[str]:
    free = {"epochs", "iterations", "repeats", "print_freq", "evaluate", "workers"}
    names = [field.name for field in dataclasses.fields(RunConfig) if field.name not in free]
    return [name for name in names if getattr(a, name) != getattr(b, name)]


def _resume_command(command: Sequence[str], path: Path) -> str:
    words = list(command)
    while "--resume" in words:
        at = words.index("--resume")
        del words[at : at + 2]
    return shlex.join([*words, "--resume", str(path)])
