"""Train at one or several levels and compare them: ampfuse train cifar --help"""

from __future__ import annotations

import argparse

from ampfuse.experiments.recipes import TRAINERS
from ampfuse.experiments.trainers import main


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trainer", choices=tuple(TRAINERS))
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of the trainer")


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Have the trainer read its options and train; returns the exit status."""
    return main(args.trainer, args.options, prog=f"{parser.prog} {args.trainer}")
