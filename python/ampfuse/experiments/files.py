"""Files that are whole or not there: written beside their place, then moved into it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ampfuse.command_line import cannot_write
from ampfuse.experiments.config import UsageError


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` at the end of the block, and vanishes if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(name, 0o666 & ~_umask())  # mkstemp's files are for their owner alone
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_json(path: Path, value: Any) -> None:
    """`value` as JSON, with None in place of what JSON cannot say (NaN, infinity)."""
    text = json.dumps(finite(value), indent=1, allow_nan=False)
    with atomic(path) as file:
        file.write(text.encode() + b"\n")


def finite(value: Any) -> Any:
    """`value` with None for every float that is NaN or infinite."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def file_name(text: str) -> str:
    """`text` as a part of a path on any system: "Tesla T4/x" becomes "Tesla T4-x"."""
    return re.sub(r'[<>:"/\\|?*\x00-\x1f]+', "-", text).strip(" .") or "unnamed"


def check_writable(option: str, folder: Path) -> None:
    """Raise UsageError if `folder` cannot take files; asked before hours are spent on them."""
    if problem := cannot_write(folder):
        raise UsageError(f"{option}: {problem}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
