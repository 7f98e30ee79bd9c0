"""The command line of the trainers: today's flags, those of the published scripts, what they mean.

Nothing heavy is imported up here: ``--help`` must not wait for torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ampfuse.command_line import OneLineParser, at_least, fraction, positive
from ampfuse.experiments.config import ARMS, DESCRIPTIONS, OPTIMIZERS, SCHEDULES
from ampfuse.experiments.recipes import Recipe, of_experiment

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
MODES = {"FP32": "fp32", "FP16": "O2", "amp": "O1"}  # E1's, as arms


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
    what.add_argument("--image-size", type=at_least(1), metavar="N", help="pixels each way")
    what.add_argument("--dropout", type=fraction, metavar="P", help="where the model has it")

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
        choices=tuple(MODES),
        help="E1's names: FP32; FP16 (O2 with a static scale of 128); amp (O1, or --opt_level)",
    )
    how.add_argument("--fp16", action="store_true", help="E4's name for O2 with a static scale")
    how.add_argument(
        "--loss-scale", "--loss_scale", metavar="N|dynamic", help="of the arms that scale"
    )
    how.add_argument(
        "--static-loss-scale", type=positive, metavar="N", help="the same, with --fp16"
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
    length.add_argument("--epochs", type=at_least(1), metavar="N")
    length.add_argument(
        "--iterations", "--iteration", type=at_least(1), metavar="N", help="training steps"
    )
    length.add_argument(
        "--repeats", type=at_least(1), metavar="N", help="runs per arm, seeds apart"
    )
    length.add_argument("--seed", type=int, default=0, metavar="N", help="of the first repeat")
    length.add_argument(
        "-b",
        "--batch-size",
        "--batch_size",
        type=at_least(1),
        metavar="N",
        help="of each process",
    )

    rule = parser.add_argument_group("optimizer")
    rule.add_argument("--optimizer", "--opt", choices=OPTIMIZERS)
    rule.add_argument("--lr", "--learning-rate", type=positive, metavar="X")
    rule.add_argument("--momentum", type=float, metavar="X", help="of SGD")
    rule.add_argument("--weight-decay", "--wd", type=float, metavar="X")
    rule.add_argument("--clip", "--clip-grad", type=positive, metavar="NORM")
    rule.add_argument("--schedule", "--sched", choices=SCHEDULES)
    rule.add_argument("--warmup", type=fraction, metavar="SHARE", help="of the run, from 0 to 1")

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
    speed.add_argument("-j", "--workers", type=at_least(0), metavar="N", help="loader processes")
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
        type=at_least(1),
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
