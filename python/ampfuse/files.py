"""Files that are whole or not there: written beside their place, then moved into it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` at the end of the block, and vanishes if that fails."""
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
            # mkstemp's files are for their owner alone
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Context for writing `path`: a failure to do so raises an OSError with that name."""
    try:
        yield
    except Exception as error:
        # Of a full disk torch.save raises an error of its archive, and the cause is the context.
        for cause in (error, error.__context__):
            if isinstance(cause, OSError) and cause.strerror:
                raise OSError(cause.errno, cause.strerror, str(path)) from error
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
