"""What ampfuse's commands share: a parser with short errors, types of arguments, a look at folders.

Nothing heavy is imported: ``--help`` must not wait for torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn


class UsageError(Exception):
    """A wish that cannot be met. The message is one line for the user; the exit status is 2."""


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
    return status_of(command, parser, parser.parse_args(argv))


def status_of(command: ModuleType, parser: OneLineParser, args: argparse.Namespace) -> int:
    """``command.run``; what the user has to put right, and Ctrl-C, end in a line."""
    try:
        return command.run(parser, args)
    except (UsageError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nInterrupted; nothing was written.", file=sys.stderr)
        return 130  # what a shell reports for a process that Ctrl-C ended


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


def check_writable(option: str, folder: Path) -> None:
    """Raise UsageError if `folder` cannot take files; asked before hours are spent on them."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not nearest.is_dir():
        raise UsageError(f"{option}: {nearest} is not a folder")
    try:  # permissions do not tell of read-only and full disks
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"0")
    except OSError as error:
        raise UsageError(f"{option}: {nearest} takes no files ({error.strerror})") from error


def check_installed(extra: str, *packages: str) -> None:
    """Raise UsageError if some of the `packages`, which ampfuse's `extra` brings, are missing."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        names = ", ".join(missing).replace("sklearn", "scikit-learn")
        raise UsageError(f"{names} missing: pip install 'ampfuse[{extra}]'")


# --- commands that take a training from a file ----------------------------------------------------


def add_target(parser: argparse.ArgumentParser) -> None:
    """The file that has the training."""
    parser.add_argument("target", metavar="FILE.py[:FUNCTION]", help="what returns the training")


def check_target(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[Path, str]:
    """The file and the function's name; ends with what is wrong, before torch is imported."""
    file, _, function = args.target.partition(".py:")
    path = Path(f"{file}.py" if function else args.target).absolute()
    if not path.is_file():
        parser.error(f"there is no file {path}")
    return path, function or "build"


def training_of(parser: argparse.ArgumentParser, path: Path, name: str) -> tuple[Any, ...]:
    """What the function `name` of the file `path` returns: four things."""
    sys.path.insert(0, str(path.parent))  # as when Python runs it: it may import its neighbours
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        parser.error(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # where pickle looks for its classes
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        fail(parser, error, path)
    function = getattr(module, name, None)
    if not callable(function):
        parser.error(
            f"{path} has no function {name}(); write one that returns (model, loss_function, "
            "batch, optimizer), or name another: FILE.py:FUNCTION"
        )
    try:
        result = function()
    except (Exception, SystemExit) as error:
        fail(parser, error, path)
    if not (isinstance(result, tuple) and len(result) == 4):
        parser.error(
            f"{name}() of {path} has to return (model, loss_function, batch, optimizer), "
            f"not {result!r:.60}"
        )
    return result


def fail(parser: argparse.ArgumentParser, error: BaseException, path: Path) -> NoReturn:
    """End with the error in one line, and the last line of the user's file that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.lineno for frame in frames if Path(frame.filename) == path]
    if isinstance(error, SyntaxError):
        own = [error.lineno]
    where = f"{path}:{own[-1]}" if own else str(path)
    text = " ".join(str(error).split())
    parser.exit(1, f"{parser.prog}: {where}: {type(error).__name__}: {text}\n")


def report_on(
    parser: argparse.ArgumentParser,
    path: Path,
    name: str,
    make: Callable[..., Any],
) -> int:
    """Print what `make` says of the training; the exit status."""
    training = training_of(parser, path, name)
    try:
        report = make(*training)
    except Exception as error:
        fail(parser, error, path)
    print(report)
    return 0
