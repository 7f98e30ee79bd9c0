"""What ampfuse's commands share: a parser with short errors, types of arguments, a look at folders.

Nothing heavy is imported: ``--help`` must not wait for torch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the forty lines of usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")


def run_alone(command: ModuleType, argv: list[str] | None, prog: str) -> int:
    """Run `command`, a module with ``add_arguments`` and ``run``, on `argv` (None: ``sys.argv``).

    Its docstring is the text of ``--help``. Returns the exit status.
    """
    parser = OneLineParser(
        prog=prog,
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    return command.run(parser, parser.parse_args(argv))


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return number


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return value


def fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def cannot_write(folder: Path) -> str | None:
    """Why `folder` cannot take the results; asked before minutes are spent on them."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        return f"{nearest} is not a folder"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"no permission to write in {nearest}"
    return None
