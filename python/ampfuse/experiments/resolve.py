"""What a command line asks for: arms, batch sizes, recipe and flags become the runs to train."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ampfuse import hardware
from ampfuse.experiments import legacy_flags
from ampfuse.experiments.arms import check_device, has_tf32
from ampfuse.experiments.config import ARMS, FLAGS, HALF_LEVELS, LEVELS, RunConfig, UsageError
from ampfuse.experiments.recipes import Recipe

if TYPE_CHECKING:
    import torch

    from ampfuse.experiments.recipes import Trainer

_MADE_UP = ("digits", "synthetic")  # data that are no folder
FUSED = ("O1", "O2", "O4", "O5")  # the arms that fuse batch norms by themselves
_SCALED = ("amp-fp16", *LEVELS[1:])  # the arms that have a loss scale


def resolve(
    args: argparse.Namespace, trainer: Trainer, device: torch.device
) -> tuple[list[RunConfig], list[str]]:
    """The runs that `args` ask for, in order, and notes on what was chosen for the user."""
    legacy_flags.translate(args)
    arms = _arms(args, device)
    if args.graph and device.type != "cuda":
        raise UsageError("--graph: a CUDA graph needs a GPU; leave it out on a CPU")
    if args.graph and args.compile:
        raise UsageError("--graph and --compile: choose one; torch.compile has graphs of its own")
    if args.sync_bn and device.type != "cuda":
        raise UsageError("--sync_bn: torch synchronizes batch norm between GPUs only")
    if args.fsdp and args.compile:
        raise UsageError("--fsdp --compile: torch.compile of shards is not supported; leave it out")
    if args.fsdp and args.fuse_batchnorm and (half := set(arms).intersection(HALF_LEVELS)):
        raise UsageError(
            f"--fsdp --fuse-batchnorm: at {min(half)} batch norms are gathered apart from the "
            "half weights, which cannot be fused; leave --fuse-batchnorm out"
        )
    given = {name: getattr(args, name) for name in FLAGS if getattr(args, name) is not None}
    configs: list[RunConfig] = []
    notes: dict[str, None] = {}
    for batch_size in given.pop("batch_size", [None]):
        wished = given | ({"batch_size": batch_size} if batch_size else {})
        of_batch = []
        for arm in arms:
            config, note = _config(args, wished, trainer, arm, device)
            of_batch.append(config)
            notes |= {note: None} if note else {}
        # Arms take turns, so that whatever else the machine does meets all of them alike.
        configs += [
            dataclasses.replace(config, repeat=repeat)
            for repeat in range(of_batch[0].repeats)
            for config in of_batch
        ]
    return configs, list(notes)


def _arms(args: argparse.Namespace, device: torch.device) -> list[str]:
    names = [name for group in args.arm or [] for name in group.split(",")]
    if not names:
        names = ["fp32", "O2" if device.type == "cuda" else "O5"]
    if names == ["all"]:
        names = [arm for arm in ARMS if arm != "tf32" or has_tf32(device)]
    by_lower = {arm.lower(): arm for arm in ARMS}
    for name in names:
        if name.lower() not in by_lower:
            raise UsageError(f"--arm {name}: the arms are {', '.join(ARMS)}, or all")
    arms = list(dict.fromkeys(by_lower[name.lower()] for name in names))
    for arm in arms:
        check_device(arm, device)
    return arms


def _config(
    args: argparse.Namespace,
    given: Mapping[str, Any],
    trainer: Trainer,
    arm: str,
    device: torch.device,
) -> tuple[RunConfig, str | None]:
    """The recipe's settings, what suits a CPU over them, and the flags `given` over both."""
    recipe = _recipe(args, trainer)
    model = args.model or (recipe.models[0] if args.recipe else trainer.default_model)
    data = args.data or trainer.default_data
    if data is None:
        raise UsageError("--data: give a folder, digits or synthetic")
    settings = {"image_size": trainer.image_size, **recipe.settings_for(model, arm)}
    if args.loop == "original":
        settings |= {"channels_last": False, "cudnn_benchmark": False, **recipe.original}
    elif data in _MADE_UP:
        settings["loader"] = "resident"
    note = None
    if device.type == "cpu":
        reduced = {name: value for name, value in recipe.cpu.items() if name not in given}
        if _LENGTH & given.keys():
            reduced = {name: reduced[name] for name in reduced if name not in _LENGTH}
        settings = {"print_freq": 5, **_over(settings, reduced)}
        sizes = ", ".join(f"{n.replace('_', ' ')} {reduced[n]}" for n in reduced if n != "repeats")
        if sizes:
            note = f"No GPU: sizes that suit a CPU ({sizes}); --batch-size, --iterations and "
            note += "--epochs choose others."
    if "epochs" in given and "iterations" not in given:
        settings |= recipe.by_epochs
    settings = _over(settings, given)
    if args.prof > 0:
        settings["iterations"] = args.prof
    if args.workers is None and "workers" in settings:
        # More of them than cores slow it down.
        settings["workers"] = min(settings["workers"], hardware.core_count())
    if args.workers and args.loader is None and data not in _MADE_UP:
        settings["loader"] = "workers"
    if args.deterministic:
        settings["cudnn_benchmark"] = False
    if data == "synthetic":
        # Enough for a few steps; more of the same noise would only cost memory.
        settings.setdefault("synthetic_size", max(2048, 4 * settings["batch_size"]))
    settings |= {
        "experiment": trainer.name,
        "recipe": recipe.name if model in recipe.models else None,
        "model": model,
        "data": data,
        "arm": arm,
        "method": args.method or arm,
        "loss_scale": args.loss_scale if arm in _SCALED else None,
        "keep_batchnorm_fp32": args.keep_batchnorm_fp32 if arm in HALF_LEVELS else None,
    }
    if arm not in LEVELS or args.fuse_batchnorm is None:
        tuned = args.loop != "original" and settings.get("channels_last", True)
        apart = args.fsdp and arm in HALF_LEVELS
        settings["fuse_batchnorm"] = arm in FUSED and tuned and not apart
    return RunConfig(**settings), note


def _recipe(args: argparse.Namespace, trainer: Trainer) -> Recipe:
    """The recipe asked for, else that of the model, else the trainer's first."""
    recipes = trainer.recipes
    if args.recipe:
        return next(recipe for recipe in recipes if recipe.name == args.recipe)
    model = args.model or trainer.default_model
    return next((recipe for recipe in recipes if model in recipe.models), recipes[0])


_LENGTH = {"epochs", "iterations"}


def _over(settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with `more` over them; a length, in epochs or iterations, replaces any other."""
    replaced = _LENGTH if _LENGTH & more.keys() else set()
    return {name: value for name, value in settings.items() if name not in replaced} | {**more}
