"""Train copies of a model for a minute at each level from O0 to O5 and under torch.amp, and say
which to use. FILE.py has a function, build() if no other is named, that returns

    model, loss_function, batch, optimizer

as amp.advise takes them: loss_function(model, batch) returns the loss; batch is one batch, or a
DataLoader. Prints a table and the reason."""

# The module's docstring is the text of `ampfuse advise --help`. Nothing heavy is imported up here,
# and so it is no part of ampfuse.insight.
from __future__ import annotations

import argparse
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from ampfuse.command_line import at_least, cannot_write, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="FILE.py[:FUNCTION]", help="what returns the training")
    add(
        "--seconds",
        type=positive,
        default=60.0,
        metavar="X",
        help="for everything (default: %(default)g)",
    )
    add("--steps", type=at_least(1), default=1000, metavar="N", help="of each training, at most")
    add("--levels", metavar="O4,O5", help="separated by commas (default: all, and torch.amp)")
    add("--plot", type=Path, metavar="FILE", help="write a picture, too")


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Do what `args` say and return the exit status; wrong ones end in ``parser.error``."""
    file, _, function = args.target.partition(".py:")
    path = Path(f"{file}.py" if function else args.target).absolute()
    if not path.is_file():
        parser.error(f"there is no file {path}")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("argument --plot: matplotlib is missing: pip install matplotlib")
    if args.plot and (problem := cannot_write(args.plot.parent)):
        parser.error(f"argument --plot: {problem}")

    from ampfuse import amp
    from ampfuse.insight.advice import LEVELS, unknown_level

    levels = LEVELS if args.levels is None else args.levels.split(",")
    if problem := unknown_level(levels):
        parser.error(f"argument --levels: {problem}")
    training = _training(parser, path, function or "build")
    print(f"Training copies of the model for about {args.seconds:g} s ...", file=sys.stderr)
    try:
        advice = amp.advise(*training, seconds=args.seconds, steps=args.steps, levels=levels)
    except Exception as error:
        _fail(parser, error, path)
    print(advice)
    if args.plot:
        advice.plot(args.plot)
        print(f"Picture: {args.plot}")
    return 0


def _training(parser: argparse.ArgumentParser, path: Path, name: str) -> tuple[Any, ...]:
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
        _fail(parser, error, path)
    function = getattr(module, name, None)
    if not callable(function):
        parser.error(
            f"{path} has no function {name}(); write one that returns (model, loss_function, "
            "batch, optimizer), or name another: FILE.py:FUNCTION"
        )
    try:
        result = function()
    except (Exception, SystemExit) as error:
        _fail(parser, error, path)
    if not (isinstance(result, tuple) and len(result) == 4):
        parser.error(
            f"{name}() of {path} has to return (model, loss_function, batch, optimizer), "
            f"not {result!r:.60}"
        )
    return result


def _fail(parser: argparse.ArgumentParser, error: BaseException, path: Path) -> NoReturn:
    """End with the error in one line, and the last line of the user's file that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.lineno for frame in frames if Path(frame.filename) == path]
    if isinstance(error, SyntaxError):
        own = [error.lineno]
    where = f"{path}:{own[-1]}" if own else str(path)
    text = " ".join(str(error).split())
    parser.exit(1, f"{parser.prog}: {where}: {type(error).__name__}: {text}\n")
