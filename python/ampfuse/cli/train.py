"""Train at one or several levels and compare them: ampfuse train cifar --help"""

from __future__ import annotations

import argparse
import importlib

from ampfuse.experiments import SCRIPTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", choices=SCRIPTS, help="the experiment")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the script")


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Have the script read its options and train; returns the exit status."""
    script = importlib.import_module(f"ampfuse.experiments.{args.script}")
    return script.main(args.options, prog=f"{parser.prog} {args.script}")
