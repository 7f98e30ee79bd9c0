"""What a command line asks for: arms, recipe and flags become the runs to train."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from ampfuse import env
from ampfuse.command_line import positive
from ampfuse.experiments.arms import check_device, has_tf32
from ampfuse.experiments.cli import MODES, Trainer
from ampfuse.experiments.config import ARMS, LEVELS, RunConfig, UsageError
from ampfuse.experiments.recipes import Recipe

if TYPE_CHECKING:
    import torch

_E1_STATIC_SCALE = 128.0


def resolve(
    args: argparse.Namespace, trainer: Trainer, device: torch.device
) -> tuple[list[RunConfig], list[str]]:
    """The runs that `args` ask for, in order, and notes on what was chosen for the user.

    Raises:
        UsageError: flags that contradict each other or the machine.
    """
    recipe = _recipe(args, trainer)
    model = args.model or (recipe.models[0] if args.recipe else trainer.default_model)
    arms = _arms(args, device)
    if args.graph and device.type != "cuda":
        raise UsageError("--graph: a CUDA graph needs a GPU; leave it out on a CPU")
    if args.graph and args.compile:
        raise UsageError("--graph and --compile: choose one; torch.compile has graphs of its own")
    if args.sync_bn and device.type != "cuda":
        raise UsageError("--sync_bn: torch synchronizes batch norm between GPUs only")
    repeats = _repeats(args, recipe, device)
    notes: list[str] = []
    first = []
    for arm, method, loss_scale in arms:
        config, said = _config(args, trainer, recipe, model, arm, device)
        first.append(
            dataclasses.replace(config, method=method, loss_scale=loss_scale, repeats=repeats)
        )
        notes += [note for note in said if note not in notes]
    # Arms take turns, so that whatever else the machine does meets all of them alike.
    configs = [
        dataclasses.replace(config, repeat=repeat) for repeat in range(repeats) for config in first
    ]
    return configs, notes


def _recipe(args: argparse.Namespace, trainer: Trainer) -> Recipe:
    """The recipe asked for, else that of the model, else the trainer's first."""
    recipes = trainer.recipes
    if args.recipe:
        return next(recipe for recipe in recipes if recipe.name == args.recipe)
    model = args.model or trainer.default_model
    return next((recipe for recipe in recipes if model in recipe.models), recipes[0])


def _repeats(args: argparse.Namespace, recipe: Recipe, device: torch.device) -> int:
    settings = {**recipe.settings, **(recipe.cpu if device.type == "cpu" else {})}
    return args.repeats or settings.get("repeats", 1)


def _arms(
    args: argparse.Namespace, device: torch.device
) -> list[tuple[str, str, float | str | None]]:
    """(arm, what plots call it, loss scale) in the order asked for."""
    scale = _loss_scale(args)
    ways = [
        flag
        for flag, given in (
            ("--arm", args.arm),
            ("--mode", args.mode),
            ("--opt-level", args.opt_level and not args.mode),
            ("--fp16", args.fp16),
        )
        if given
    ]
    if len(ways) > 1:
        raise UsageError(f"{' and '.join(ways)}: these name an arm each; give one of them")
    if args.opt_level and args.opt_level not in LEVELS:
        raise UsageError(f"--opt-level {args.opt_level}: the levels are {', '.join(LEVELS)}")
    if args.mode == "FP16":
        if args.opt_level:
            raise UsageError("--opt-level goes with --mode amp, not with --mode FP16")
        return [("O2", "FP16", _E1_STATIC_SCALE if scale is None else scale)]
    if args.mode:
        arm = args.opt_level if args.mode == "amp" and args.opt_level else MODES[args.mode]
        return [(arm, args.mode, _scale_of(arm, scale))]
    if args.fp16:
        return [("O2", "fp16", 1.0 if scale is None else scale)]
    if args.static_loss_scale and not args.opt_level and not args.arm:
        return [("fp32", "fp32", None)]  # E4's FP32 line: a scale, but no --fp16
    names = [name for group in args.arm or [] for name in group.split(",")]
    if args.opt_level:
        names = [args.opt_level]
    if not names:
        names = list(default_arms(device))
    if names == ["all"]:
        names = available_arms(device)
    by_lower = {arm.lower(): arm for arm in ARMS}
    for name in names:
        if name.lower() not in by_lower:
            raise UsageError(f"--arm {name}: the arms are {', '.join(ARMS)}, or all")
    arms = list(dict.fromkeys(by_lower[name.lower()] for name in names))
    for arm in arms:
        check_device(arm, device)
    return [(arm, arm, _scale_of(arm, scale)) for arm in arms]


def default_arms(device: torch.device) -> tuple[str, ...]:
    return ("fp32", "O2") if device.type == "cuda" else ("fp32", "O5")


def available_arms(device: torch.device) -> list[str]:
    """Every arm that `device` runs."""
    return [arm for arm in ARMS if arm != "tf32" or has_tf32(device)]


def _loss_scale(args: argparse.Namespace) -> float | str | None:
    given = [
        (flag, value)
        for flag, value in (
            ("--loss-scale", args.loss_scale),
            ("--static-loss-scale", args.static_loss_scale),
            ("--dynamic-loss-scale", "dynamic" if args.dynamic_loss_scale else None),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(flag for flag, _ in given)}: give one of them")
    if not given or given[0][1] == "None":  # an old script's default, passed on
        return None
    flag, value = given[0]
    if value == "dynamic":
        return "dynamic"
    try:
        return positive(str(value))
    except (ValueError, argparse.ArgumentTypeError):
        raise UsageError(f'{flag} {value}: give a positive number or "dynamic"') from None


def _scale_of(arm: str, scale: float | str | None) -> float | str | None:
    """`scale`, for the arms that scale losses."""
    return scale if arm == "amp-fp16" or (arm in LEVELS and arm != "O0") else None


def _config(
    args: argparse.Namespace,
    trainer: Trainer,
    recipe: Recipe,
    model: str,
    arm: str,
    device: torch.device,
) -> tuple[RunConfig, list[str]]:
    """The recipe's settings, what suits a CPU over them, and the flags over both."""
    data = args.data or args.data_folder or trainer.default_data
    if args.data and args.data_folder:
        raise UsageError(f"--data {args.data} and {args.data_folder}: give one data folder")
    if data is None:
        raise UsageError("--data: give a folder, digits or synthetic")
    settings = {"image_size": trainer.image_size, **recipe.settings_for(model, arm)}
    settings.pop("repeats", None)
    notes = []
    if args.loop == "original":
        settings |= {"channels_last": False, "cudnn_benchmark": False, **recipe.original}
    elif data in ("digits", "synthetic"):
        settings["loader"] = "resident"
    if device.type == "cpu":
        reduced = {name: value for name, value in recipe.cpu.items() if name != "repeats"}
        if args.epochs or args.iterations:
            reduced = {k: v for k, v in reduced.items() if k not in ("epochs", "iterations")}
        elif reduced.keys() & {"epochs", "iterations"}:
            settings = {k: v for k, v in settings.items() if k not in ("epochs", "iterations")}
        changed = {k: v for k, v in reduced.items() if getattr(args, k, None) is None}
        settings |= changed
        settings.setdefault("print_freq", 5)
        if changed:
            said = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in changed.items())
            notes.append(
                f"No GPU: sizes that suit a CPU ({said}); "
                "--batch-size, --iterations and --epochs choose others."
            )
    if args.epochs or args.iterations:
        settings.pop("epochs", None)
        settings.pop("iterations", None)
    if args.epochs and not args.iterations:
        settings |= recipe.by_epochs
    flags = {
        "image_size": args.image_size,
        "dropout": args.dropout,
        "epochs": args.epochs,
        "iterations": args.iterations,
        "batch_size": args.batch_size,
        "optimizer": args.optimizer,
        "lr": args.lr,
        "momentum": args.momentum,
        "weight_decay": args.weight_decay,
        "clip": args.clip,
        "schedule": args.schedule,
        "warmup": args.warmup,
        "loader": args.loader,
        "workers": args.workers,
        "channels_last": args.channels_last,
        "cudnn_benchmark": args.cudnn_benchmark,
        "evaluate": args.evaluate,
        "print_freq": args.print_freq,
        "keep_batchnorm_fp32": _keep_batchnorm(args, arm),
    }
    settings |= {name: value for name, value in flags.items() if value is not None}
    if args.prof > 0:
        settings["iterations"] = args.prof
    if args.workers is None and "workers" in settings:
        # More of them than cores slow it down.
        settings["workers"] = min(settings["workers"], env.core_count())
    if args.deterministic:
        settings["cudnn_benchmark"] = False
    if args.workers is not None and args.loader is None and data not in ("digits", "synthetic"):
        settings["loader"] = "workers" if args.workers else settings.get("loader", "resident")
    if data == "synthetic":
        # Enough for a few steps; more of the same noise would only cost memory.
        settings.setdefault("synthetic_size", max(2048, 4 * settings["batch_size"]))
    return (
        RunConfig(
            experiment=trainer.name,
            recipe=recipe.name if model in recipe.models else None,
            model=model,
            data=data,
            arm=arm,
            method=arm,
            seed=args.seed,
            loop=args.loop,
            graph=args.graph,
            compile=args.compile,
            deterministic=args.deterministic,
            sync_bn=args.sync_bn,
            **settings,
        ),
        notes,
    )


def _keep_batchnorm(args: argparse.Namespace, arm: str) -> bool | None:
    if args.keep_batchnorm_fp32 in (None, "None") or arm not in ("O2", "O3", "O5"):
        return None
    return args.keep_batchnorm_fp32 == "True"
