"""Fetch MNIST or CIFAR-10 by torchvision, whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from ampfuse.experiments.data.sets import PUBLISHED, DataError, ImageSet, one_line

_SECONDS = 20.0  # without a sign of life, until the network counts as missing


def download(
    kind: str, folder: Path, read: Callable[[Path], ImageSet | None], expected: str
) -> ImageSet:
    """Download the data set `kind` into `folder`, as torchvision lays it out, and `read` it.

    Processes that share the folder wait for the first of them, and read what it fetched.

    Raises:
        DataError: no network, or no permission; it names the files that were `expected`.
    """
    title = PUBLISHED[kind].title
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (images := read(folder)) is None:
                print(f"{title} is not in {folder}: downloading it there", file=sys.stderr)
                _fetch(kind, folder)
                images = read(folder)
        finally:
            os.close(lock)  # which unlocks it
    # torchvision passes on what sockets, servers and checksums say.
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            for path in made:
                path.rmdir()
        raise DataError(
            f"--data {folder}: holds no {title}, and it could not be downloaded "
            f"({one_line(error)}); expected: {expected}; or give --data digits or synthetic"
        ) from error
    assert images is not None
    return images


def _fetch(kind: str, folder: Path) -> None:
    from torchvision import datasets

    source = {"mnist": datasets.MNIST, "cifar10": datasets.CIFAR10}[kind]
    patience = socket.getdefaulttimeout()
    # Beside its place first, so that a download that breaks off leaves nothing that looks whole.
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
        # torchvision sets no time limit of its own: a silent network would hang the run.
        socket.setdefaulttimeout(_SECONDS)
        try:
            source(temporary, download=True)
        finally:
            socket.setdefaulttimeout(patience)
        for path in Path(temporary).iterdir():
            if path.is_dir():
                shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
            else:
                path.replace(folder / path.name)
