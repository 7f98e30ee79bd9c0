"""A command's runs, one after the other: data, training, result files, and the table at the end."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ampfuse.command_line import check_writable
from ampfuse.devices import choose_device, device_name
from ampfuse.experiments import checkpoint, diagnose, report, signals
from ampfuse.experiments.config import RunConfig, UsageError
from ampfuse.experiments.distributed import PeerLost, World
from ampfuse.experiments.record import RunResult, file_name, run_name
from ampfuse.experiments.resolve import FUSED, resolve
from ampfuse.experiments.run_log import RunLog
from ampfuse.experiments.tasks import TASKS
from ampfuse.experiments.training import Diverged, Interrupted, Place, Training

if TYPE_CHECKING:
    from ampfuse.experiments.data import Data
    from ampfuse.experiments.recipes import Trainer

# Exit statuses besides 0: 2 is what argparse uses, 128 + signal what shells report.
_FAILED, _WRONG_USE, _DIVERGED, _PEER_LOST = 1, 2, 3, 4


def run_command(trainer: Trainer, args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Do what `args`, parsed from `argv`, say and return the exit status (docs/experiments.md)."""
    world = World.of_environment()
    voice = _Voice(trainer.name, world, args.resume)
    try:
        status = _run_command(trainer, args, argv, voice)
        world.any(False)  # who ends is missed by those that are not done
        return status
    except (UsageError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError) and voice.checkpoint:  # a disk that was full, in a run
            text += f". {voice.how_to_go_on()}"
        if world.fail(text):
            voice.error(text)
        return _WRONG_USE
    except PeerLost as error:
        voice.error(f"{error}. {voice.how_to_go_on()}")
        return _PEER_LOST
    except Exception as error:
        if world.size == 1:
            raise
        what = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        world.fail(what)
        voice.error(f"{world.named(what)} ({voice.traceback()}). {voice.how_to_go_on()}")
        return _FAILED
    finally:
        world.close()


@dataclasses.dataclass
class _Voice:
    """What a command prints: of all processes the main one speaks, but errors are of each."""

    name: str
    world: World
    checkpoint: Path | None  # where that of the present run is, if it was saved
    folder: Path | None = None

    def __call__(self, text: str) -> None:
        if self.world.is_main:
            print(text)

    def error(self, text: str) -> None:
        print(f"{self.name}: error: {text}", file=sys.stderr, flush=True)

    def how_to_go_on(self) -> str:
        if self.checkpoint and os.path.exists(self.checkpoint):
            return f"To go on, give --resume {self.checkpoint}"
        return "Nothing was saved yet: start again; with --checkpoints every epoch is saved"

    def leave(self, text: str) -> None:
        """End this process, wherever it hangs."""
        self.error(f"{text}. {self.how_to_go_on()}")
        os._exit(_PEER_LOST)

    def traceback(self) -> str:
        """That of the present exception goes into a file: among the lines of many processes
        nobody finds it."""
        if self.folder is None:
            return "".join(traceback.format_exc())
        path = self.folder / f"{self.name}-process{self.world.rank}-error.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback.format_exc())
        return f"see {path}"


def _run_command(
    trainer: Trainer, args: argparse.Namespace, argv: Sequence[str], voice: _Voice
) -> int:
    world = voice.world
    device = _device(args.device, world)
    resume = checkpoint.load(args.resume) if args.resume else None
    if resume and resume.config.arm in FUSED and args.fuse_batchnorm is None:
        args.fuse_batchnorm = resume.config.fuse_batchnorm  # earlier versions did not
    configs, notes = resolve(args, trainer, device)
    if world.size > 1 and args.graph:
        raise UsageError("--graph: capture under torchrun is not supported; leave it out")
    if world.size == 1 and args.fsdp:
        raise UsageError("--fsdp: one process has nobody to share with; start several by torchrun")
    folder = voice.folder = args.output / file_name(args.GPU or device_name(device))
    check_writable("--output", folder)
    position = _position(configs, resume, world.size)
    command = [Path(sys.executable).name, "-m", f"ampfuse.experiments.{trainer.name}", *argv]
    with signals.listening() as wish:
        world.connect(device, args.timeout, voice.leave)
        place = Place(
            device,
            world,
            folder,
            wish,
            profile_steps=max(0, args.prof),
            save_epochs=args.checkpoints,
            command=command,
        )
        voice(report.heading(trainer, configs, device, world.size))
        for note in notes:
            voice(note)
        several = len({config.batch_size for config in configs}) > 1
        results: list[RunResult] = []
        try:
            for result in _train_all(configs[position:], resume, place, args, voice):
                results.append(result)
                voice(report.line(result, of_several_batches=several))
        except Interrupted as stop:
            if stop.checkpoint:
                resume_line = _resume_command(command, stop.checkpoint)
                voice(f"\nStopped after step {stop.step} and saved. To go on:\n  {resume_line}")
            if results:
                voice(report.table(results))
            return 128 + stop.signal_number
    voice(report.table(results))
    voice(f"Results: {folder.absolute()}")
    if trainer.closing_lines:
        voice(report.closing_lines(results))
    return _DIVERGED if any(result.diverged for result in results) else 0


def _train_all(
    configs: Sequence[RunConfig],
    resume: checkpoint.Checkpoint | None,
    place: Place,
    args: argparse.Namespace,
    voice: _Voice,
) -> Iterator[RunResult]:
    """Train `configs`, the first of them from `resume`; their result files are written."""
    for _, group in itertools.groupby(configs, key=_data_settings):
        alike = list(group)
        task = TASKS[alike[0].experiment]
        with contextlib.closing(task.open_data(alike[0], place.device, place.world)) as data:
            for config in alike:
                data.reseed(config.seed + config.repeat)
                yield _train_one(config, data, place, resume, args, voice)
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
    voice: _Voice,
) -> RunResult:
    name = resume.name if resume else place.world.of_main(run_name(config))
    with contextlib.closing(_run_log(config, place, name, args)) as log:
        training = Training(config, data, place, name, resume, log)
        if not resume or training.checkpoint_path.exists():
            voice.checkpoint = training.checkpoint_path
        try:
            result = training.run()
        except Diverged as error:
            voice(f"{config.title}: diverged; training again up to step {error.step} to see where")
            diverged = diagnose.explain(training, error)
            result = dataclasses.replace(training.result(), diverged=diverged)
    if training.files:
        result.write(training.files / f"{name}.json")
    if training.files and training.checkpoint_path and not args.checkpoints:
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
    return choose_device(name)


def _position(
    configs: Sequence[RunConfig], resume: checkpoint.Checkpoint | None, processes: int
) -> int:
    """Which run a checkpoint belongs to. Those before it are done. It may be made longer, and go
    on in another number of processes, if their batches together are the same."""
    if resume is None:
        return 0
    free = {"epochs", "iterations", "repeats", "print_freq", "evaluate", "workers", "fsdp"}
    if resume.config.fsdp != configs[0].fsdp:
        free.add("fuse_batchnorm")
    names = [field.name for field in dataclasses.fields(RunConfig) if field.name not in free]
    then = resume.config
    differences = [
        [
            f"{n} {getattr(then, n)!r} then and {getattr(now, n)!r} now"
            for n in names
            if getattr(then, n) != getattr(now, n)
        ]
        for now in (_of_processes(config, processes, resume) for config in configs)
    ]
    nearest = min(differences, key=len)
    if nearest:
        raise UsageError(f"--resume: the checkpoint is of another run ({', '.join(nearest)})")
    return differences.index(nearest)


def _of_processes(config: RunConfig, processes: int, resume: checkpoint.Checkpoint) -> RunConfig:
    """`config`, with the batch size that it has in as many processes as `resume` had."""
    size = config.batch_size * processes / (resume.world_size or processes)
    return dataclasses.replace(config, batch_size=int(size) if size.is_integer() else size)


def _resume_command(command: Sequence[str], path: Path) -> str:
    words = list(command)
    while "--resume" in words:
        at = words.index("--resume")
        del words[at : at + 2]
    return shlex.join([*words, "--resume", str(path)])
