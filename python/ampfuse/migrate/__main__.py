"""Report line by line what a script uses of apex, and what it becomes in ampfuse and in torch."""

from __future__ import annotations

import argparse
import io
import sys
import tokenize
from pathlib import Path

from ampfuse.command_line import run_alone
from ampfuse.files import atomic
from ampfuse.migrate.imports import rewrite_imports
from ampfuse.migrate.uses import find_uses


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
    return run_alone(sys.modules[__name__], argv)


def _report(path: Path, *, write: bool) -> int:
    if path.suffix == ".ipynb":
        return _refused(path, f"notebook: first run jupyter nbconvert --to script {path}")
    try:
        data = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        source = data.decode(encoding)
        uses = find_uses(source)
    except SyntaxError as error:
        place = path if error.lineno is None else f"{path}:{error.lineno}"
        return _refused(place, f"cannot be read as Python: {error.msg}")
    except (OSError, UnicodeDecodeError) as error:
        return _refused(path, f"cannot be read: {error}")
    for use in uses:
        print(
            f"{path}:{use.line}: {use.name}\n    ampfuse: {use.ampfuse}\n    torch:   {use.torch}"
        )
    if not uses:
        print(f"{path}: uses nothing of apex")
    changed = rewrite_imports(source) if write else source
    if changed != source:
        target = path.resolve()  # a link stays a link
        try:  # at once: whoever reads it meanwhile sees the old file or the new one
            with atomic(target, target.stat().st_mode & 0o7777) as file:
                file.write(changed.encode(encoding))
        except OSError as error:
            return _refused(path, f"cannot be written: {error}")
        print(f"{path}: imports changed")
    return int(any(not use.available for use in uses))


def _refused(place: Path | str, why: str) -> int:
    print(f"{place}: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
