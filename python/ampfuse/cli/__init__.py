"""The command line: ``ampfuse demo``, ``train``, ``doctor``, ``env`` and others.

A command is a module with ``add_arguments(parser)`` and ``run(parser, args)``, which returns the
exit status; its docstring is what ``--help`` says. Only the module of the command that is given is
imported: ``env`` has to run where the others do not.
"""

from __future__ import annotations

import argparse
import importlib
import sys

import ampfuse
from ampfuse.command_line import OneLineParser, status_of

COMMANDS = {
    "demo": ("ampfuse.experiments.demo", "train a small network at every level and compare them"),
    "train": ("ampfuse.experiments", "run an experiment: cifar, imagenet, mnist or mlp"),
    "make_plot": ("ampfuse.experiments.make_plot", "draw the results of the experiments"),
    "make_table": (
        "ampfuse.experiments.make_table",
        "print the results of an experiment next to the published ones",
    ),
    "doctor": (
        "ampfuse.cli.doctor",
        "show where a training script spends its time, and what would help",
    ),
    "plan": ("ampfuse.cli.plan", "say whether a training fits into memory, and what makes it fit"),
    "env": ("ampfuse.cli.env", "print what a bug report needs"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv` (default: ``sys.argv``) and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = OneLineParser(prog="ampfuse", description="Mixed-precision training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"ampfuse {ampfuse.__version__}")
    parsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, (_, what) in COMMANDS.items():
        parsers.add_parser(name, help=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    if argv[:1] and argv[0] in COMMANDS:
        command = importlib.import_module(COMMANDS[argv[0]][0])
        command_parser = parsers.choices[argv[0]]
        command_parser.description = command.__doc__
        command.add_arguments(command_parser)
    args = parser.parse_args(argv)  # ends here for --help, --version and an unknown command
    return status_of(lambda: command.run(command_parser, args), command_parser.prog)
