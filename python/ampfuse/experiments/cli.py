"""The command line of the trainers: the flags that :mod:`config` declares, and those of a command.

Nothing heavy is imported up here: ``--help`` must not wait for torch.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampfuse.command_line import OneLineParser, positive
from ampfuse.experiments import legacy_flags
from ampfuse.experiments.config import ARMS, DESCRIPTIONS, FLAGS, GROUPS, PRECISION, WHAT, WHERE

if TYPE_CHECKING:
    from ampfuse.experiments.recipes import Trainer

# Flags that take several values, with what follows them as a value, right or wrong, and is no
# folder of data.
_SEVERAL = {
    "--arm": re.compile(r"(?i)([o0]\d|fp\d+|tf\d+|bf16|amp[-_\w]*|all)(,[-_\w]+)*"),
    "--batch-size": re.compile(r"\d+(,\d+)*"),
    "-b": re.compile(r"\d+(,\d+)*"),
}


def parser_for(trainer: Trainer, prog: str) -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=prog,
        description=_description(trainer),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    groups = {name: parser.add_argument_group(name) for name in GROUPS}
    _add_command_arguments(groups, trainer)
    for name, field in FLAGS.items():
        options: dict[str, Any] = dict(field.metadata)
        group, names = groups[options.pop("group")], options.pop("names")
        if "help" in options:
            known = vars(trainer) | {"default_data": trainer.default_data or "none"}
            options["help"] = options["help"].format_map(known)
        # None is what was not given: the recipe decides.
        group.add_argument(*names, dest=name, default=None, **options)
    legacy_flags.add_arguments(parser)
    return parser


def _description(trainer: Trainer) -> str:
    text = f"{trainer.title}\n\nRecipes (published settings; a flag wins over them):\n"
    for recipe in trainer.recipes:
        text += f"  {recipe.name}  {recipe.title}\n      models: {', '.join(recipe.models)}\n"
        text += f"      not published, so ours: {recipe.ours}\n" if recipe.ours else ""
    return text + "\nArms:" + "".join(f"\n  {arm:<9} {DESCRIPTIONS[arm]}" for arm in ARMS)


def _add_command_arguments(groups: dict[str, Any], trainer: Trainer) -> None:
    """The flags that are no setting of one run."""
    names = sorted({recipe.name for recipe in trainer.recipes})
    which = "published settings (default: those of the model)"
    groups[WHAT].add_argument("--recipe", choices=names, help=which)
    which = "one or several of those above, or all (default: FP32 and O2, or O5 on a CPU)"
    groups[PRECISION].add_argument("--arm", action="append", metavar="ARM ...", help=which)
    add, on = groups[WHERE].add_argument, {"action": "store_true"}
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--GPU", metavar="NAME", help="what results call the device (default: its name)")
    add("-o", "--output", type=Path, default=Path("results"), metavar="DIR")
    add("--resume", type=Path, metavar="FILE", help="go on from a checkpoint (.pt)")
    waits = "seconds that processes wait for each other at most (default: 600)"
    add("--timeout", type=positive, default=600.0, metavar="S", help=waits)
    add("--checkpoints", **on, help="save one at the end of each epoch; the last of a run stays")
    profile = "train N steps under torch's profiler and write a trace"
    add("--prof", type=int, default=-1, metavar="N", help=profile)
    add("--tensorboard", **on, help="write its files too")
    add("--quiet", **on, help="no progress bars")


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse `argv`; the data folder may stand anywhere. Exits with status 2 on what is wrong."""
    return parser.parse_intermixed_args(_joined(legacy_flags.spelled_today(argv)))


def _joined(words: list[str]) -> list[str]:
    """`words` with ``--arm=O0,O2 DATA`` for ``--arm O0 O2 DATA``, where argparse would take DATA
    for one more value."""
    joined = []
    while words:
        flag = words.pop(0)
        if flag in _SEVERAL and words:
            values = [words.pop(0)]
            while words and _SEVERAL[flag].fullmatch(words[0]):
                values.append(words.pop(0))
            flag += "=" + ",".join(values)
        joined.append(flag)
    return joined
