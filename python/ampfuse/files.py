"""Files that are written completely or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which replaces `path` at the end of the block unless that fails. Errors are
    an OSError that names `path`."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        # If the disk is full, torch.save raises an error of its own, with the cause as its context.
        for cause in (error, error.__context__):
            if isinstance(cause, OSError) and cause.strerror:
                raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise
