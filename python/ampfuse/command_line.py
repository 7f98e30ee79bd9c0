"""What ampfuse's commands share: a parser with short errors, types of arguments, a look at folders.

Nothing heavy is imported: ``--help`` must not wait for torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NoReturn


class UsageError(Exception):
    """A wrong request. The message is one line for the user; the exit status is 2."""


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the forty lines of usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")


def run_alone(command: ModuleType, argv: list[str] | None = None) -> int:
    """Run `command`, a module with ``add_arguments`` and ``run``, on `argv` (None: ``sys.argv``).

    Its docstring is the text of ``--help``. Returns the exit status.
    """
    assert command.__spec__ is not None  # it is run by its name, as python -m does it
    parser = OneLineParser(
        prog=f"python -m {command.__spec__.name}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    args = parser.parse_args(argv)
    return status_of(lambda: command.run(parser, args), parser.prog)


def status_of(run: Callable[[], int], prog: str, left: str = "nothing was written") -> int:
    """What `run` returns; what the user has to put right, and Ctrl-C, end in a line. The latter
    says what is `left`."""
    try:
        return run()
    except (UsageError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2  # as of argparse
    except KeyboardInterrupt:
        print(f"\nInterrupted; {left}.", file=sys.stderr)
        return 130  # what a shell reports for a process that Ctrl-C ended


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return number


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def check_writable(option: str, folder: Path) -> None:
    """Raise UsageError if `folder` cannot take files; asked before hours are spent on them."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not nearest.is_dir():
        raise UsageError(f"{option}: {nearest} is not a folder")
    try:  # permissions do not show read-only and full disks
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"0")
    except OSError as error:
        raise UsageError(f"{option}: cannot write to {nearest} ({error.strerror})") from error


def check_installed(extra: str, *packages: str) -> None:
    """Raise UsageError if some of the `packages`, which ampfuse's `extra` brings, are missing."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        names = ", ".join(missing).replace("sklearn", "scikit-learn")
        raise UsageError(f"{names} not installed: pip install 'ampfuse[{extra}]'")
