"""Report line by line what a script uses of apex, and what it becomes in ampfuse and in plain
torch."""

from __future__ import annotations

import argparse
import sys
import tokenize
from pathlib import Path

from ampfuse.command_line import run_alone
from ampfuse.files import atomic
from ampfuse.migrate.imports import rewrite_imports
from ampfuse.migrate.uses import Use, find_uses


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    parser.add_argument(
        "--write",
        action="store_true",
        help="change the imports to ampfuse.compat.apex; nothing else in the files changes",
    )


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Report on the files of `args`.

    Returns:
        0; 1 if a file uses something that has no counterpart here; 2 if one cannot be read or
        written.
    """
    return max(_report(path, write=args.write) for path in args.files)


def main(argv: list[str] | None = None) -> int:
    """``python -m ampfuse.migrate``: the same as ``ampfuse migrate``."""
    return run_alone(sys.modules[__name__], argv, "python -m ampfuse.migrate")


def _report(path: Path, *, write: bool) -> int:
    if path.suffix == ".ipynb":
        print(
            f"{path}: is a notebook; save its code as a script first: "
            f"jupyter nbconvert --to script {path}",
            file=sys.stderr,
        )
        return 2
    try:
        with open(path, "rb") as file:
            encoding, _ = tokenize.detect_encoding(file.readline)
        data = path.read_bytes()
        source = data.decode(encoding)
        uses = find_uses(source)
    except SyntaxError as error:
        line = "" if error.lineno is None else f":{error.lineno}"
        print(f"{path}{line}: cannot be read as Python: {error.msg}", file=sys.stderr)
        return 2
    except (OSError, UnicodeDecodeError) as error:
        print(f"{path}: cannot be read: {error}", file=sys.stderr)
        return 2
    for use in uses:
        print(_as_text(path, use))
    if not uses:
        print(f"{path}: uses nothing of apex")
    if write:
        changed = rewrite_imports(source)
        if changed != source:
            try:
                _replace(path, changed.encode(encoding))
            except OSError as error:
                print(f"{path}: cannot be written: {error}", file=sys.stderr)
                return 2
            print(f"{path}: imports changed")
    return int(any(not use.available for use in uses))


def _as_text(path: Path, use: Use) -> str:
    lines = [f"{path}:{use.line}: {use.name}", f"    ampfuse: {use.ampfuse}"]
    return "\n".join([*lines, f"    torch:   {use.torch}"])


def _replace(path: Path, data: bytes) -> None:
    """Write `path` at once: whoever reads it meanwhile sees the old file or the new one."""
    target = path.resolve()  # a link stays a link
    with atomic(target, target.stat().st_mode & 0o7777) as file:
        file.write(data)


if __name__ == "__main__":
    sys.exit(main())
