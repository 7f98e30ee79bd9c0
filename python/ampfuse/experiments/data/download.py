"""Fetch MNIST or CIFAR-10 by torchvision, whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ampfuse.experiments.data import request
from ampfuse.experiments.data.request import DataError, one_line
from ampfuse.experiments.data.sets import ImageSet

KINDS = ("mnist", "cifar10")
_SECONDS = 20.0  # without a sign of life, until the network counts as missing


def fetch(kind: str, folder: Path, load: Callable[[], ImageSet | None], expected: str) -> ImageSet:
    """Download the data set `kind` into `folder`, as torchvision lays it out, and `load` it.

    Processes that share the folder wait for the first of them, and load what it fetched.

    Raises:
        DataError: no network, or no permission; it names the files that were `expected`.
    """
    title = request.KINDS[kind].title
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder):
            images = load()
            if images is None:
                print(f"{title} is not in {folder}: downloading it there", file=sys.stderr)
                _fetch(kind, folder)
                images = load()
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
    # Beside its place first, so that a download that breaks off leaves nothing that looks whole.
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary, _patience():
        source(temporary, train=True, download=True)
        for name in os.listdir(temporary):
            target = folder / name
            if target.is_dir():
                shutil.copytree(Path(temporary, name), target, dirs_exist_ok=True)
            else:
                os.replace(Path(temporary, name), target)


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold a lock on `folder` among the processes of this machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # which unlocks it


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """torchvision sets no time limit of its own: a silent network would hang the run."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
