"""Shared code of ampfuse's commands: a parser with short errors, types of arguments, checks.

It imports the standard library alone: ``ampfuse env`` runs without torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NoReturn


class UsageError(Exception):
    """A mistake of the user. The message is one line; the exit status is 2."""


class OneLineParser(argparse.ArgumentParser):
    """Prints errors in one line, without forty lines of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options)\n")


def run_alone(command: ModuleType, argv: list[str] | None = None) -> int:
    """Run `command`, a module with ``add_arguments`` and ``run``, on `argv` (None: ``sys.argv``).

    The text of ``--help`` is its docstring. Returns the exit status.
    """
    assert command.__spec__ is not None  # run by its name, as by python -m
    parser = OneLineParser(
        prog=f"python -m {command.__spec__.name}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    args = parser.parse_args(argv)
    return status_of(lambda: command.run(parser, args), parser.prog)


def status_of(run: Callable[[], int], prog: str, after_ctrl_c: str = "nothing was written") -> int:
    """Call `run` and return the exit status. Mistakes of the user and Ctrl-C print a line;
    `after_ctrl_c` is what the latter says of the files."""
    try:
        return run()
    except (UsageError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2  # as argparse
    except KeyboardInterrupt:
        print(f"\nInterrupted; {after_ctrl_c}.", file=sys.stderr)
        return 130  # as a shell reports Ctrl-C


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a script as ``python`` takes it."""
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module name")
    parser.add_argument("script", metavar="SCRIPT", help="the script, as given to python")
    parser.add_argument(
        "args", metavar="ARGS", nargs=argparse.REMAINDER, help="the script's arguments"
    )


def check_script(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with an error if the script's file is missing."""
    if not args.module and not os.path.exists(args.script):
        parser.error(f"no such file: {args.script}")


def enter_script(args: argparse.Namespace) -> None:
    """Set ``sys.argv`` and ``sys.path[0]`` as ``python`` sets them for the script."""
    sys.argv = [args.script, *args.args]
    sys.path[0] = os.getcwd() if args.module else os.path.dirname(os.path.realpath(args.script))


def run_script(args: argparse.Namespace) -> None:
    """Run the script as ``__main__``."""
    if args.module:
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(args.script, run_name="__main__")


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
    """Raise UsageError if `folder` is not writable, before hours are spent on its files."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not nearest.is_dir():
        raise UsageError(f"{option}: {nearest} is not a folder")
    try:  # permissions do not tell read-only and full disks
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"0")
    except OSError as error:
        raise UsageError(f"{option}: cannot write to {nearest} ({error.strerror})") from error


def check_installed(extra: str, *packages: str) -> None:
    """Raise UsageError if one of the `packages` of ampfuse's `extra` is missing."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        names = ", ".join(missing).replace("sklearn", "scikit-learn")
        raise UsageError(f"{names} not installed: pip install 'ampfuse[{extra}]'")
