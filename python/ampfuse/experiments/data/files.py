"""MNIST, CIFAR-10 and ImageNet from their published files.

torchvision downloads the first two. It does not read them here: it takes one layout of folders,
leaves open which file is damaged, and unpickles whatever stands in CIFAR-10's.
"""

from __future__ import annotations

import gzip
import io
import itertools
import pickle
import struct
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ampfuse.experiments.data import sets
from ampfuse.experiments.data.download import download
from ampfuse.experiments.data.sets import DataError, ImageFiles, ImageSet, Pixels, one_line


def read_files(kind: str, folder: str, image_size: int) -> ImageSet:
    """The published data set `kind` ("mnist", "cifar10" or "imagenet") out of `folder`.

    MNIST and CIFAR-10 are downloaded into a folder that holds none of them, and resized to
    `image_size`. ImageNet stays in its files.

    Raises:
        DataError: it is not there, damaged, or could not be downloaded.
    """
    place, title = Path(folder).expanduser(), sets.PUBLISHED[kind].title
    read, expected = {
        "mnist": (_mnist, _MNIST_EXPECTED),
        "cifar10": (_cifar10, _CIFAR10_EXPECTED),
        "imagenet": (_imagenet, _IMAGENET_EXPECTED),
    }[kind]
    try:
        images = read(place)
    except OSError as error:
        raise DataError(f"--data {place}: not readable ({one_line(error)})") from error
    if images is None and place.exists() and not place.is_dir():
        raise DataError(f"--data {place}: no folder; expected one that holds {expected}")
    if images is None and kind == "imagenet":
        raise DataError(
            f"--data {place}: holds no {title}; expected: {expected}; or give --data "
            "digits or synthetic"
        )
    images = images or download(kind, place, read, expected)
    if isinstance(images.train, Pixels) and isinstance(images.test, Pixels):
        train, test = images.train.resized(image_size), images.test.resized(image_size)
        images = ImageSet(train, test, images.facts)
    return images


def _find(names: list[str], places: Iterable[Path], ends: Iterable[str] = ("",)) -> dict[str, Path]:
    """Where each file is, by name; nothing of those that are in none of the places."""
    found: dict[str, Path] = {}
    for name, place, end in itertools.product(names, places, ends):
        path = place / (name + end)
        if name not in found and path.is_file():
            found[name] = path
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


# MNIST: IDX files, a big-endian header and bytes, gzipped or not.

_MNIST_TRAIN = ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"]
_MNIST_TEST = ["t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"]
_MNIST = _MNIST_TRAIN + _MNIST_TEST
_MNIST_EXPECTED = (
    f"{', '.join(_MNIST)} (each with or without .gz, in the folder or in MNIST/raw below it)"
)


def _mnist(folder: Path) -> ImageSet | None:
    found = _find(_MNIST, (folder, folder / "MNIST" / "raw", folder / "raw"), ("", ".gz"))
    if not found:
        return None
    if missing := [name for name in _MNIST if name not in found]:
        raise DataError(f"--data {folder}: MNIST lacks {', '.join(missing)} (or with .gz)")

    def split(images_file: Path, labels_file: Path) -> Pixels:
        images, labels = _idx(images_file, dimensions=3), _idx(labels_file, dimensions=1)
        if len(images) != len(labels):
            raise DataError(
                f"{images_file} has {len(images)} images, but {labels_file} {len(labels)} labels: "
                "they do not belong together"
            )
        return _pixels(images[:, None], labels.long(), labels_file)

    train, test = (split(*(found[name] for name in pair)) for pair in (_MNIST_TRAIN, _MNIST_TEST))
    return ImageSet(train, test, sets.PUBLISHED["mnist"])


def _idx(path: Path, dimensions: int) -> Tensor:
    """An IDX file of bytes: uint8 of as many dimensions as said."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error
    header = 4 + 4 * dimensions
    # Two zeros, the code of unsigned bytes, the number of dimensions; then each one's size.
    if len(content) < header or content[:4] != bytes((0, 0, 8, dimensions)):
        raise DataError(f"{path}: no IDX file of bytes with {dimensions} dimensions")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    length = header + torch.Size(shape).numel()
    if len(content) != length:
        raise DataError(f"{path}: {len(content)} bytes, but {length} by its header: fetch it again")
    pixels = np.frombuffer(content, np.uint8)[header:].copy()
    return torch.from_numpy(pixels).view(shape)


# CIFAR-10: six pickled dictionaries, in a folder or still in the archive.

_CIFAR10_FOLDER, _CIFAR10_ARCHIVE = "cifar-10-batches-py", "cifar-10-python.tar.gz"
_CIFAR10 = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
_CIFAR10_EXPECTED = (
    f"{_CIFAR10_FOLDER}/ with data_batch_1 to data_batch_5 and test_batch, or {_CIFAR10_ARCHIVE}"
)


def _cifar10(folder: Path) -> ImageSet | None:
    found = _find(_CIFAR10, (folder, folder / _CIFAR10_FOLDER))
    contents = {name: (path, path.read_bytes()) for name, path in found.items()}
    beside = [folder.parent / _CIFAR10_ARCHIVE] if folder.name == _CIFAR10_FOLDER else []
    for archive in (folder, folder / _CIFAR10_ARCHIVE, *beside):
        if not contents and archive.is_file():
            contents = _unpacked(archive)
    if not contents:
        return None
    if missing := [name for name in _CIFAR10 if name not in contents]:
        raise DataError(f"--data {folder}: CIFAR-10 lacks {', '.join(missing)}")
    *train, test = (_cifar10_batch(*contents[name]) for name in _CIFAR10)
    images, labels = (
        torch.cat([getattr(part, name) for part in train]) for name in ("images", "labels")
    )
    return ImageSet(Pixels(images, labels), test, sets.PUBLISHED["cifar10"])


def _unpacked(archive: Path) -> dict[str, tuple[Path, bytes]]:
    """Path and content of the batches in it, by name."""
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
    """Knows arrays and plain data. A pickle can name any function to call: here, only these."""

    allowed: ClassVar = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        # Functions without a public name: what rebuilds an array, and a number that NumPy made.
        ("numpy.core.multiarray", "scalar"): np.uint8(0).__reduce__()[0],
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy.core.numeric", "_frombuffer"): np.empty(0).__reduce_ex__(5)[0],
        # How Python 3 writes bytes for Python 2 to read.
        ("_codecs", "encode"): lambda text, encoding: text.encode("latin1"),
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self.allowed[module.replace("numpy._core", "numpy.core"), name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None


# ImageNet: train/CLASS/*.jpg and val/CLASS/*.jpg.

_IMAGENET_EXPECTED = (
    "train/ and val/ (or validation/), with a folder of JPEG or PNG files for each class"
)


def _imagenet(folder: Path) -> ImageSet | None:
    """Classes are the folders of ``train`` in alphabetical order, as torchvision counts them."""
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    train = folder / "train"
    test = next((folder / name for name in ("val", "validation") if (folder / name).is_dir()), None)
    if not train.is_dir() and test is None:
        return None
    if not train.is_dir() or test is None:
        missing = "train/" if test else "val/ (or validation/)"
        raise DataError(f"--data {folder}: lacks {missing}; expected: {_IMAGENET_EXPECTED}")
    names, of_test = (
        sorted(path.name for path in part.iterdir() if path.is_dir()) for part in (train, test)
    )
    for part, classes in ((train, names), (test, of_test)):
        if not classes:
            raise DataError(f"{part}: holds no class folders; expected: {_IMAGENET_EXPECTED}")
    if unknown := [name for name in of_test if name not in names]:
        raise DataError(f"{test}: has class {unknown[0]}, which {train} lacks")
    numbers = {name: number for number, name in enumerate(names)}

    def split(part: Path) -> ImageFiles:
        found = make_dataset(str(part), numbers, extensions=IMG_EXTENSIONS, allow_empty=True)
        if not found:
            raise DataError(f"{part}: its class folders hold no JPEG or PNG files")
        paths, labels = zip(*found, strict=True)
        return ImageFiles(paths, torch.tensor(labels))

    facts = replace(sets.PUBLISHED["imagenet"], classes=len(names))
    return ImageSet(split(train), split(test), facts)
