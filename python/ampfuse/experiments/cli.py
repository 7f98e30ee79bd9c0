"""The command line of the trainers: today's flags, those of the published scripts, what they mean.

Nothing heavy is imported up here: ``--help`` must not wait for torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ampfuse.experiments.config import (
    ARMS,
    DESCRIPTIONS,
    LEVELS,
    OPTIMIZERS,
    SCHEDULES,
    RunConfig,
    UsageError,
)
from ampfuse.experiments.recipes import Recipe, of_experiment

if TYPE_CHECKING:
    import torch

# What the trainers import, and the packages it comes in. Plots and tables need more, digits too.
_NEEDED = {"torchvision": "torchvision", "timm": "timm", "rich": "rich", "tqdm": "tqdm"}

# Flags of the published scripts that took a value which today's spelling leaves out.
_SWITCHES = (
    "--channels-last",
    "--channels_last",
    "--cudnn-benchmark",
    "--keep-batchnorm-fp32",
    "--keep_batchnorm_fp32",
)
# What is meant as an arm, right or wrong, and not as a folder.
_ARM_LIKE = re.compile(r"(?i)([o0]\d|fp\d+|tf\d+|bf16|amp[-_\w]*|all)(,[-_\w]+)*")
# E1's modes, as arms.
_MODES = {"FP32": "fp32", "FP16": "O2", "amp": "O1"}
_E1_STATIC_SCALE = 128.0


@dataclasses.dataclass(frozen=True)
class Trainer:
    """One command: its name, what it trains, and what differs from its siblings.

    Attributes:
        models: names that ``--model`` takes; a pattern may stand for several (``wrn<d>_<w>``).
        image_size: default of ``--image-size``.
        closing_lines: end with the two lines that E5's scripts printed.
    """

    name: str
    title: str
    models: tuple[str, ...]
    default_model: str
    image_size: int
    default_data: str | None
    closing_lines: bool = False

    @property
    def recipes(self) -> list[Recipe]:
        return of_experiment(self.name)


def missing_packages(data: str | None) -> list[str]:
    """What training on `data` needs of the extra ``experiments`` and is not installed."""
    needed = {**_NEEDED, **({"sklearn": "scikit-learn"} if data == "digits" else {})}
    return [package for name, package in needed.items() if importlib.util.find_spec(name) is None]


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the forty lines of usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")


def parser_for(trainer: Trainer, prog: str) -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=prog,
        description=_description(trainer),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser, trainer)
    return parser


def _description(trainer: Trainer) -> str:
    lines = [trainer.title, "", "Recipes (published settings; a flag wins over them):"]
    for recipe in trainer.recipes:
        lines.append(f"  {recipe.name}  {recipe.title}")
        lines.append(f"      models: {', '.join(recipe.models)}")
        if recipe.ours:
            lines.append(f"      not published, so ours: {recipe.ours}")
    lines += ["", "Arms:"]
    lines += [f"  {arm:<9} {DESCRIPTIONS[arm]}" for arm in ARMS]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser, trainer: Trainer) -> None:
    what = parser.add_argument_group("what to train")
    what.add_argument("data_folder", nargs="?", metavar="DATA", help="the same as --data")
    what.add_argument(
        "--data",
        "--data-path",
        "--data-dir",
        metavar="PATH|digits|synthetic",
        help="a folder with the data set (MNIST and CIFAR-10 are downloaded into an empty one), "
        "scikit-learn's handwritten digits, or noise"
        + (f" (default: {trainer.default_data})" if trainer.default_data else ""),
    )
    what.add_argument(
        "--model",
        "-a",
        "--arch",
        metavar="NAME",
        help=f"{', '.join(trainer.models)} (default: the recipe's, else {trainer.default_model})",
    )
    what.add_argument(
        "--recipe",
        choices=sorted({recipe.name for recipe in trainer.recipes}),
        help="published settings (default: those of the model)",
    )
    what.add_argument("--image-size", type=_at_least(1), metavar="N", help="pixels each way")
    what.add_argument("--dropout", type=_fraction, metavar="P", help="where the model has it")

    how = parser.add_argument_group("precision")
    how.add_argument(
        "--arm",
        "--arms",
        action="append",
        metavar="ARM ...",
        help="one or several of those above, or all (default: FP32 and O2, or O5 on a CPU)",
    )
    how.add_argument(
        "--opt-level", "--opt_level", "--amp-level", metavar="O0..O5", help="the same as --arm O1"
    )
    how.add_argument(
        "--mode",
        choices=tuple(_MODES),
        help="E1's names: FP32; FP16 (O2 with a static scale of 128); amp (O1, or --opt_level)",
    )
    how.add_argument("--fp16", action="store_true", help="E4's name for O2 with a static scale")
    how.add_argument(
        "--loss-scale", "--loss_scale", metavar="N|dynamic", help="of the arms that scale"
    )
    how.add_argument(
        "--static-loss-scale", type=_positive, metavar="N", help="the same, with --fp16"
    )
    how.add_argument("--dynamic-loss-scale", action="store_true", help="the same as dynamic")
    how.add_argument(
        "--keep-batchnorm-fp32",
        "--keep_batchnorm_fp32",
        nargs="?",
        const="True",
        choices=("True", "False", "None"),
        help="at O2, O3 and O5",
    )

    length = parser.add_argument_group("length")
    length.add_argument("--epochs", type=_at_least(1), metavar="N")
    length.add_argument(
        "--iterations", "--iteration", type=_at_least(1), metavar="N", help="training steps"
    )
    length.add_argument(
        "--repeats", type=_at_least(1), metavar="N", help="runs per arm, seeds apart"
    )
    length.add_argument("--seed", type=int, default=0, metavar="N", help="of the first repeat")
    length.add_argument(
        "-b",
        "--batch-size",
        "--batch_size",
        type=_at_least(1),
        metavar="N",
        help="of each process",
    )

    rule = parser.add_argument_group("optimizer")
    rule.add_argument("--optimizer", "--opt", choices=OPTIMIZERS)
    rule.add_argument("--lr", "--learning-rate", type=_positive, metavar="X")
    rule.add_argument("--momentum", type=float, metavar="X", help="of SGD")
    rule.add_argument("--weight-decay", "--wd", type=float, metavar="X")
    rule.add_argument("--clip", "--clip-grad", type=_positive, metavar="NORM")
    rule.add_argument("--schedule", "--sched", choices=SCHEDULES)
    rule.add_argument("--warmup", type=_fraction, metavar="SHARE", help="of the run, from 0 to 1")

    speed = parser.add_argument_group("speed, for every arm alike")
    speed.add_argument(
        "--loop",
        choices=("tuned", "original"),
        default="tuned",
        help="original: that of the published script, as a further row (its loader, the loss read "
        "at every step, torch's memory format)",
    )
    speed.add_argument(
        "--loader",
        choices=("resident", "workers"),
        help="whole set on the device, or worker processes",
    )
    speed.add_argument("-j", "--workers", type=_at_least(0), metavar="N", help="loader processes")
    speed.add_argument(
        "--channels-last",
        "--channels_last",
        action=_Switch,
        help="NHWC (default: on; --no-channels-last turns it off)",
    )
    speed.add_argument("--no-channels-last", dest="channels_last", action="store_false")
    speed.add_argument("--cudnn-benchmark", action=_Switch, help="let cuDNN try (default: on)")
    speed.add_argument("--no-cudnn-benchmark", dest="cudnn_benchmark", action="store_false")
    speed.add_argument("--graph", action="store_true", help="the step as one CUDA graph")
    speed.add_argument("--compile", action="store_true", help="torch.compile")
    speed.add_argument("--deterministic", action="store_true", help="the same bits every time")
    speed.add_argument("--sync_bn", "--sync-bn", action="store_true", help="batch norm across GPUs")
    speed.set_defaults(channels_last=None, cudnn_benchmark=None)
    parser.set_defaults(closing_lines=trainer.closing_lines)

    where = parser.add_argument_group("where")
    where.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    where.add_argument("--local_rank", "--local-rank", type=int, help="ignored: torchrun tells it")
    where.add_argument(
        "--GPU",
        "--gpu-name",
        metavar="NAME",
        help="what results call the device (default: its name)",
    )
    where.add_argument(
        "-o", "--output", "--output-dir", type=Path, default=Path("results"), metavar="DIR"
    )
    where.add_argument("--resume", type=Path, metavar="FILE", help="go on from a checkpoint (.pt)")
    where.add_argument(
        "--checkpoints",
        action="store_true",
        help="save one at the end of each epoch, and keep the last of each run",
    )
    where.add_argument(
        "--evaluate",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="test after each epoch",
    )
    where.add_argument(
        "-p",
        "--print-freq",
        type=_at_least(1),
        metavar="N",
        help="steps between two looks at the loss (default: 50, on a CPU 5)",
    )
    where.add_argument(
        "--prof",
        type=int,
        default=-1,
        metavar="N",
        help="train N steps under torch's profiler and write a trace",
    )
    where.add_argument("--tensorboard", action="store_true", help="write its files too")
    where.add_argument("--quiet", action="store_true", help="no progress bars")


class _Switch(argparse.Action):
    """A switch that also takes the value old command lines gave it: ``--channels-last True``."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs="?", metavar="True|False", **kwargs)

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, values in (None, "True", "true", "1"))


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse `argv`; the data folder may stand anywhere. Exits with status 2 on what is wrong."""
    return parser.parse_intermixed_args(_join_values(argv))


def _join_values(argv: Sequence[str]) -> list[str]:
    """`argv` with values tied to their flags where argparse would take DATA for one of them.

    ``--channels-last True DATA`` becomes ``--channels-last=True DATA``, and ``--arm O0 O2 DATA``
    ``--arm=O0,O2 DATA``.
    """
    joined: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in ("--arm", "--arms") and words:
            arms = [words.pop(0)]
            while words and _ARM_LIKE.fullmatch(words[0]):
                arms.append(words.pop(0))
            word += "=" + ",".join(arms)
        elif word in _SWITCHES:
            given = words and words[0] in ("True", "False", "true", "false", "0", "1", "None")
            word += "=" + (words.pop(0) if given else "True")
        joined.append(word)
    return joined


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
    notes: list[str] = []
    configs = []
    for repeat in range(_repeats(args, recipe, device)):
        for arm, method, loss_scale in arms:
            config, said = _config(args, trainer, recipe, model, arm, device)
            configs.append(
                dataclasses.replace(
                    config,
                    method=method,
                    loss_scale=loss_scale,
                    repeat=repeat,
                    repeats=_repeats(args, recipe, device),
                )
            )
            notes += [note for note in said if note not in notes]
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
        arm = args.opt_level if args.mode == "amp" and args.opt_level else _MODES[args.mode]
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
    from ampfuse.experiments.arms import check_device

    for arm in arms:
        check_device(arm, device)
    return [(arm, arm, _scale_of(arm, scale)) for arm in arms]


def default_arms(device: torch.device) -> tuple[str, ...]:
    return ("fp32", "O2") if device.type == "cuda" else ("fp32", "O5")


def available_arms(device: torch.device) -> list[str]:
    """Every arm that `device` runs."""
    from ampfuse.experiments.arms import has_tf32

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
        return _positive(str(value))
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
        settings["workers"] = min(settings["workers"], core_count())  # more of them slow it down
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


def core_count() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _keep_batchnorm(args: argparse.Namespace, arm: str) -> bool | None:
    if args.keep_batchnorm_fp32 in (None, "None") or arm not in ("O2", "O3", "O5"):
        return None
    return args.keep_batchnorm_fp32 == "True"


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value
