"""The commands that train: their runs one after another, result files, and the table at the end."""

from __future__ import annotations

import argparse
import datetime
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ampfuse.command_line import UsageError, check_installed, check_writable, status_of
from ampfuse.devices import choose_device, device_name
from ampfuse.experiments import distributed, make_table, models, results
from ampfuse.experiments.data import open_data
from ampfuse.experiments.distributed import World
from ampfuse.experiments.results import OUT_OF_MEMORY, Result
from ampfuse.experiments.settings import FP16, WITHOUT_FOLDER, Script, Settings, parse, runs_of
from ampfuse.experiments.training import Diverged, Job, Run, load_checkpoint, position

DIVERGED = 3  # exit status; the others are in status_of()
# What the line of a run reports of its result.
_REPORTED = {
    "images_per_s": "{:,.1f} images/s",
    "loss_last": "loss {:.4f}",
    "test_loss": "test loss {:.4f}",
    "accuracy_pct": "test accuracy {:.1f}%",
}


def sweep(script: Script, argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Train what `argv` (default: ``sys.argv``) asks for, and return the exit status
    (docs/experiments.md). Errors of the user are one line and status 2."""
    argv = sys.argv[1:] if argv is None else list(argv)
    prog = prog or f"python -m ampfuse.experiments.{script.name}"
    args = parse(script, argv, prog)
    left = "finished runs have saved their results; --resume continues from a checkpoint"
    return status_of(lambda: _sweep(script, args, shlex.join([*prog.split(), *argv])), prog, left)


def _sweep(script: Script, args: argparse.Namespace, command: str) -> int:
    check_installed("experiments", "torchvision", "timm", "tqdm", "sklearn")
    world = World.of_environment()
    if world.size > 1 and not script.distributed:
        raise UsageError(f"{script.name} trains in one process; only imagenet supports torchrun")
    by_rank = world.size > 1 and args.device in ("auto", "cuda") and torch.cuda.is_available()
    device = choose_device(f"cuda:{world.local_rank}" if by_rank else args.device)
    resume = load_checkpoint(args.resume) if args.resume else None
    todo = runs_of(args, script, device)
    if args.data not in (None, *WITHOUT_FOLDER) and not Path(args.data).expanduser().is_dir():
        raise UsageError(f"--data {args.data}: no such folder; create it to download into it")
    _check_runs(todo, world, device)
    label = results.file_name(args.GPU or device_name(device))
    job = Job(device, world, args.output / label, label, bool(args.checkpoints), args.prof > 0)
    check_writable("--output", job.folder)
    todo = todo[position(todo, resume, world) :] if resume else todo
    say = (lambda text: None) if world.rank else print
    say(f"{script.title} {todo[0].data} data, on {device_name(device)}, torch {torch.__version__}.")
    trained = []
    with world.connected(device):
        for result in train_all(todo, job, resume, command):
            trained.append(result)
            say(report(result, todo[0].repeats))
    rows = results.rows_of(trained)
    say(f"\n{make_table.table(rows, make_table.TRAINED)}\n\n{make_table.explained(rows)}")
    say(f"{'Traces' if job.profile else 'Results'}: {job.folder.absolute()}")
    return DIVERGED if any(row.diverged for row in rows) else 0


def _check_runs(todo: Sequence[Settings], world: World, device: torch.device) -> None:
    """Raise UsageError for any of the runs `todo` that would fail, before the first one trains."""
    for settings in todo:
        distributed.check(settings, world, device)
    model = todo[0].model  # of all runs
    try:
        with torch.device("meta"):
            models.build(model, classes=10, channels=3, image_size=todo[0].image_size)
    except ValueError as error:
        raise UsageError(f"--model {model}: {error}") from error


def train_all(
    todo: Sequence[Settings], job: Job, resume: dict[str, Any] | None = None, command: str = ""
) -> Iterator[Result]:
    """Train the runs `todo`, the first one from `resume`, and write their result files. Ctrl-C
    prints how `command` continues."""
    checkpoints = []
    for settings in todo:
        # So that no run replaces another's files.
        when = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]
        length = f"i{settings.iterations}" if settings.iterations else f"e{settings.epochs}"
        parts = (settings.experiment, settings.model, settings.variant)
        numbers = f"b{settings.batch_size}-{length}-r{settings.repeat}"
        name = resume["name"] if resume else results.file_name("-".join([*parts, numbers, when]))
        name = job.world.gather(name)[0]
        data = open_data(settings, job.device, job.world.rank, job.world.size)
        run = Run(settings, data, job, name, resume)
        checkpoints.append(Path(f"{run.stem}.pt"))
        reason = None  # of an early end; the error itself would keep the run's tensors
        try:
            run.train()
        except Diverged as error:
            reason = str(error)
        except RuntimeError as error:
            if job.world.size > 1 or not _is_out_of_memory(error):
                raise
            reason = OUT_OF_MEMORY
        except KeyboardInterrupt:
            saved = [path for path in checkpoints if path.is_file()]
            if saved and job.world.rank == 0:
                by = "torchrun, with as many processes, of " if job.world.size > 1 else ""
                print(f"\nTo continue: {by}{command} --resume {shlex.quote(str(saved[-1]))}")
            raise
        result, resume = results.result_of(run, reason), None
        if job.folder and job.world.rank == 0 and not job.profile:
            results.save(result, job.folder / f"{name}.json")
        yield result


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def report(result: Result, repeats: int = 1) -> str:
    """One run of `repeats` as one line."""
    name = f"{result['model']} {result['variant']} batch {result['batch_size']}"
    name += f", {result['repeat'] + 1} of {repeats}" if repeats > 1 else ""
    if diverged := result["diverged"]:
        return f"{name} {results.ending(diverged)}.{_advice(result)}"
    parts = [text.format(result[n]) for n, text in _REPORTED.items() if result[n] is not None]
    if result["skipped_steps"]:
        parts.append(f"{result['skipped_steps']} steps skipped")
    return f"{name}: {', '.join(parts)}"


def _advice(result: Result) -> str:
    """What to try after an early end."""
    precision = result["conditions"]["precision"]
    if result["diverged"]["reason"] == OUT_OF_MEMORY:
        return "\n  Try a smaller --batch-size."
    advice = "\n  Try a lower --lr"
    if precision in FP16:
        scale = f" Loss scale: {result['loss_scale']:.10g}."
        advice = f"{scale}{advice}, --loss-scale dynamic, or BF16"
    if precision == "O3":
        advice += ". O3 has neither FP32 masters nor a loss scale: try O2"
    find = "To find the first inf or NaN, wrap the step in amp.explain_overflow(model)."
    return f"{advice}.\n  {find}"
