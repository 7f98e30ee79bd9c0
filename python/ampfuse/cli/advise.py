"""Train copies of a model for a minute at each level from O0 to O5, and say which to use.
FILE.py has a function, build() if no other is named, that returns

    model, loss_function, batch, optimizer

as amp.advise takes them: loss_function(model, batch) returns the loss; batch is one batch, or a
DataLoader. Prints a table and the reason."""

# The module's docstring is the text of `ampfuse advise --help`; nothing heavy is imported up here.
from __future__ import annotations

import argparse
import sys
from typing import Any

from ampfuse.command_line import add_target, at_least, check_target, positive, report_on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_target(parser)
    whole = "for everything (default: %(default)g)"
    add("--seconds", type=positive, default=60.0, metavar="X", help=whole)
    add("--steps", type=at_least(1), default=1000, metavar="N", help="of each training, at most")
    add("--levels", metavar="O4,O5", help="separated by commas (default: all)")


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Do what `args` say and return the exit status; wrong ones end in ``parser.error``."""
    path, function = check_target(parser, args)

    from ampfuse.amp.policy import LEVELS
    from ampfuse.doctor.levels import advise, unknown_level

    levels = tuple(LEVELS) if args.levels is None else args.levels.split(",")
    if problem := unknown_level(levels):
        parser.error(f"argument --levels: {problem}")
    options = {"seconds": args.seconds, "steps": args.steps, "levels": levels}

    def make(*training: Any) -> Any:
        print(f"Training copies of the model for about {args.seconds:g} s ...", file=sys.stderr)
        return advise(*training, **options)

    return report_on(parser, path, function, make)
