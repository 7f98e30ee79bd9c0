"""MNIST, CIFAR-10 and ImageNet from their published files.

torchvision downloads the first two. It does not read them here: it takes one layout of folders,
leaves open which file is damaged, and unpickles whatever stands in CIFAR-10's.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import io
import itertools
import os
import pickle
import shutil
import socket
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ampfuse.experiments.data.sets import (
    PUBLISHED,
    DataError,
    ImageFiles,
    ImageSet,
    Pixels,
    one_line,
)

_MNIST = [
    *("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    *("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
]
_CIFAR10 = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
_FOLDER, _ARCHIVE = "cifar-10-batches-py", "cifar-10-python.tar.gz"  # of CIFAR-10
_EXPECTED = {
    "mnist": f"{', '.join(_MNIST)} (each with or without .gz, in the folder or in MNIST/raw below "
    "it)",
    "cifar10": f"{_FOLDER}/ with data_batch_1 to data_batch_5 and test_batch, or {_ARCHIVE}",
    "imagenet": "train/ and val/ (or validation/), with a folder of JPEG or PNG files for each "
    "class",
}

# Path and content of each file, by name.
Contents = dict[str, tuple[Path, bytes]]


def read_files(kind: str, folder: str, image_size: int) -> ImageSet:
    """The published data set `kind` ("mnist", "cifar10" or "imagenet") out of `folder`.

    MNIST and CIFAR-10 are downloaded into a folder that holds none of them, and resized to
    `image_size`. ImageNet stays in its files.

    Raises:
        DataError: it is not there, damaged, or could not be downloaded.
    """
    place, expected, failure = Path(folder).expanduser(), _EXPECTED[kind], ""
    try:
        images = _read(kind, place, image_size)
    except OSError as error:
        raise DataError(f"--data {place}: not readable ({one_line(error)})") from error
    if images is None and place.exists() and not place.is_dir():
        raise DataError(f"--data {place}: no folder; expected one that holds {expected}")
    if images is None and kind != "imagenet":
        try:
            images = _download(kind, place, image_size)
        # torchvision passes on what sockets, servers and checksums say.
        except (OSError, RuntimeError) as error:
            failure = f", and it could not be downloaded ({one_line(error)})"
    if images is None:
        raise DataError(
            f"--data {place}: holds no {PUBLISHED[kind].title}{failure}; expected: {expected}; "
            "or give --data digits or synthetic"
        )
    return images


def _read(kind: str, folder: Path, image_size: int) -> ImageSet | None:
    """The set out of `folder`; None if that holds nothing of it."""
    if kind == "imagenet":
        return _imagenet(folder)
    if kind == "mnist":
        names, split, hint = _MNIST, _mnist, " (or with .gz)"
        files = _contents(names, (folder, folder / "MNIST" / "raw", folder / "raw"))
    else:
        names, split, hint = _CIFAR10, _cifar10, ""
        files = _contents(names, (folder, folder / _FOLDER)) or _unpacked(folder)
    if not files:
        return None
    if missing := [name for name in names if name not in files]:
        title = PUBLISHED[kind].title
        raise DataError(f"--data {folder}: {title} lacks {', '.join(missing)}{hint}")
    train, test = (part.resized(image_size) for part in split(files))
    return ImageSet(train, test, PUBLISHED[kind])


def _download(kind: str, folder: Path, image_size: int) -> ImageSet | None:
    """Fetch the set into `folder` by torchvision, whole or not at all, and read it.

    Processes that share the folder wait for the first of them, and read what it fetched.
    """
    from torchvision import datasets

    source = {"mnist": datasets.MNIST, "cifar10": datasets.CIFAR10}[kind]
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    patience, lock = socket.getdefaulttimeout(), os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if images := _read(kind, folder, image_size):
            return images
        print(f"{PUBLISHED[kind].title} is not in {folder}: downloading it there", file=sys.stderr)
        # torchvision sets no time limit of its own: a silent network would hang the run.
        socket.setdefaulttimeout(20.0)
        # Beside its place first, so that a download that breaks off leaves nothing behind.
        with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
            source(temporary, download=True)
            for path in Path(temporary).iterdir():
                if path.is_dir():
                    shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
                else:
                    path.replace(folder / path.name)
        return _read(kind, folder, image_size)
    finally:
        socket.setdefaulttimeout(patience)
        os.close(lock)  # which unlocks it
        with contextlib.suppress(OSError):  # unless something is in them now
            for path in made:
                path.rmdir()


def _contents(names: list[str], places: Iterable[Path]) -> Contents:
    """Of those `names` that are in one of the `places`, as they are or gzipped."""
    found: Contents = {}
    for name, place, end in itertools.product(names, places, ("", ".gz")):
        path = place / (name + end)
        if name in found or not path.is_file():
            continue
        try:
            content = path.read_bytes()
            found[name] = path, gzip.decompress(content) if end else content
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(path, error) from error
    return found


def _unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: damaged or not readable ({one_line(error)}): fetch it again")


def _pixels(images: Tensor, labels: Tensor, file: Path) -> Pixels:
    """Both, of ten classes; DataError, which names `file`, if they cannot be."""
    if len(labels) == 0:
        raise DataError(f"{file}: holds no images")
    wrong = labels[(labels < 0) | (labels > 9)]
    if len(wrong):
        raise DataError(f"{file}: damaged: label {int(wrong[0])} is not one of 0 to 9")
    return Pixels(images, labels)


# MNIST: IDX files, a big-endian header and bytes.


def _mnist(files: Contents) -> tuple[Pixels, Pixels]:
    def split(images_file: str, labels_file: str) -> Pixels:
        images = _idx(*files[images_file], dimensions=3)
        labels = _idx(*files[labels_file], dimensions=1)
        if len(images) != len(labels):
            raise DataError(
                f"{files[images_file][0]} has {len(images)} images, but {files[labels_file][0]} "
                f"{len(labels)} labels: they do not belong together"
            )
        return _pixels(images[:, None], labels.long(), files[labels_file][0])

    return split(*_MNIST[:2]), split(*_MNIST[2:])


def _idx(path: Path, content: bytes, dimensions: int) -> Tensor:
    """An IDX file of bytes: uint8 of as many dimensions as said."""
    header = 4 + 4 * dimensions
    # Two zeros, the code of unsigned bytes, the number of dimensions; then each one's size.
    if len(content) < header or content[:4] != bytes((0, 0, 8, dimensions)):
        raise DataError(f"{path}: no IDX file of bytes with {dimensions} dimensions")
    shape = np.frombuffer(content, ">u4", dimensions, offset=4).tolist()
    length = header + torch.Size(shape).numel()
    if len(content) != length:
        raise DataError(f"{path}: {len(content)} bytes, but {length} by its header: fetch it again")
    return torch.from_numpy(np.frombuffer(content, np.uint8)[header:].reshape(shape).copy())


# CIFAR-10: six pickled dictionaries, in a folder or still in the archive.


def _cifar10(files: Contents) -> tuple[Pixels, Pixels]:
    *parts, test = (_cifar10_batch(*files[name]) for name in _CIFAR10)
    images = torch.cat([part.images for part in parts])
    labels = torch.cat([part.labels for part in parts])
    return Pixels(images, labels), test


def _unpacked(folder: Path) -> Contents:
    """The batches in the archive in `folder`, if there is one, or beside the folder made for it."""
    archives = [folder, folder / _ARCHIVE]  # the archive itself will do too
    if folder.name == _FOLDER:
        archives.append(folder.parent / _ARCHIVE)
    archive = next(filter(Path.is_file, archives), None)
    if archive is None:
        return {}
    found = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = Path(member.name).name
                if member.isfile() and name in _CIFAR10 and (file := tar.extractfile(member)):
                    found[name] = (archive / member.name, file.read())
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise _unreadable(archive, error) from error
    if not found:
        raise DataError(f"{archive}: holds none of {', '.join(_CIFAR10)}")
    return found


def _cifar10_batch(path: Path, content: bytes) -> Pixels:
    """One batch, of any number of images."""
    try:
        batch = _Unpickler(io.BytesIO(content), encoding="latin1").load()
        pixels, labels = np.asarray(batch["data"]), np.asarray(batch["labels"], dtype=np.int64)
    # A damaged pickle makes the unpickler raise nearly anything.
    except Exception as error:
        raise DataError(f"{path}: damaged, or no CIFAR-10 batch ({one_line(error)})") from error
    if pixels.dtype != np.uint8 or pixels.shape[1:] != (3 * 32 * 32,) or labels.ndim != 1:
        raise DataError(f"{path}: no CIFAR-10 batch: its images are not rows of 3072 bytes")
    if len(pixels) != len(labels):
        raise DataError(f"{path}: damaged: {len(pixels)} images, but {len(labels)} labels")
    images = torch.from_numpy(pixels.copy()).view(-1, 3, 32, 32)
    return _pixels(images, torch.from_numpy(labels), path)


class _Unpickler(pickle.Unpickler):
    """Knows arrays and plain data. A pickle can name any function to call: it gets one of these."""

    known: ClassVar = {
        "ndarray": np.ndarray,
        "dtype": np.dtype,
        # Functions without a public name: what rebuilds an array, and a number that NumPy made.
        "scalar": np.uint8(0).__reduce__()[0],
        "_reconstruct": np.empty(0).__reduce__()[0],
        "_frombuffer": np.empty(0).__reduce_ex__(5)[0],
        # How Python 3 writes bytes for Python 2 to read.
        "encode": lambda text, encoding: text.encode("latin1"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in self.known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return self.known[name]


# ImageNet: train/CLASS/*.jpg and val/CLASS/*.jpg.


def _imagenet(folder: Path) -> ImageSet | None:
    """Classes are the folders of ``train`` in alphabetical order, as torchvision counts them."""
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    train, *places = (folder / name for name in ("train", "val", "validation"))
    test = next(filter(Path.is_dir, places), None)
    if not train.is_dir() and test is None:
        return None
    if not train.is_dir() or test is None:
        missing = "train/" if test else "val/ (or validation/)"
        raise DataError(f"--data {folder}: lacks {missing}; expected: {_EXPECTED['imagenet']}")
    numbers: dict[str, int] = {}
    splits = []
    for part in (train, test):
        names = sorted(path.name for path in part.iterdir() if path.is_dir())
        if not names:
            raise DataError(f"{part}: holds no class folders; expected: {_EXPECTED['imagenet']}")
        numbers = numbers or {name: number for number, name in enumerate(names)}
        if unknown := [name for name in names if name not in numbers]:
            raise DataError(f"{test}: has class {unknown[0]}, which {train} lacks")
        found = make_dataset(str(part), numbers, extensions=IMG_EXTENSIONS, allow_empty=True)
        if not found:
            raise DataError(f"{part}: its class folders hold no JPEG or PNG files")
        paths, labels = zip(*found, strict=True)
        splits.append(ImageFiles(paths, torch.tensor(labels)))
    return ImageSet(splits[0], splits[1], replace(PUBLISHED["imagenet"], classes=len(numbers)))
