"""Say what a training holds in memory now and in each memory mode of the optimizers, and what fits.
FILE.py has a function, build() if no other is named, that returns

    model, loss_function, batch, optimizer

as for `ampfuse advise`: loss_function(model, batch) returns the loss; batch is one batch or a
DataLoader, or None to leave out activations. Nothing is trained. Prints a table."""

# The module's docstring is the text of `ampfuse memory --help`; nothing heavy is imported up here.
from __future__ import annotations

import argparse
from typing import Any

from ampfuse.command_line import add_target, check_target, report_on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--budget", default="16GB", metavar="SIZE", help="(default: %(default)s)")


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Do what `args` say and return the exit status; wrong ones end in ``parser.error``."""
    path, function = check_target(parser, args)

    from torch.utils.data import DataLoader

    from ampfuse.insight.memory import bytes_of, memory_report

    try:
        budget = bytes_of(args.budget)
    except ValueError as error:
        parser.error(f"argument --budget: {error}")

    def make(model: Any, loss_function: Any, batch: Any, optimizer: Any) -> Any:
        batch = next(iter(batch)) if isinstance(batch, DataLoader) else batch
        return memory_report(model, optimizer, batch, loss_function=loss_function, budget=budget)

    return report_on(parser, path, function, make)
