"""Run a trainer, for ``ampfuse train NAME`` and ``python -m ampfuse.experiments.NAME``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from ampfuse.experiments.cli import parse, parser_for
from ampfuse.experiments.recipes import TRAINERS

# What the trainers import, and the packages it comes in. Plots and tables need more, digits too.
_NEEDED = {"torchvision": "torchvision", "timm": "timm", "rich": "rich", "tqdm": "tqdm"}


def missing_packages(data: str | None) -> list[str]:
    """What training on `data` needs of the extra ``experiments`` and is not installed."""
    needed = {**_NEEDED, **({"sklearn": "scikit-learn"} if data == "digits" else {})}
    return [package for name, package in needed.items() if importlib.util.find_spec(name) is None]


def main(name: str, argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the trainer called `name` on `argv` (default: ``sys.argv``); return the exit status.

    Wrong use ends in ``SystemExit(2)`` or status 2, with one line that says what.
    """
    trainer = TRAINERS[name]
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = parser_for(trainer, prog or f"python -m ampfuse.experiments.{name}")
    args = parse(parser, argv)
    if missing := missing_packages(args.data or args.data_folder):
        print(
            f"{parser.prog}: {', '.join(missing)} missing: pip install 'ampfuse[experiments]'",
            file=sys.stderr,
        )
        return 1
    from ampfuse.experiments.runner import run_command

    return run_command(trainer, args, argv)
