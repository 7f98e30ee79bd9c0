"""MNIST in its own format, IDX: a big-endian header and bytes, gzipped or not.

Read here and not by torchvision, which takes one layout of folders only.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from ampfuse.experiments.data.request import KINDS, DataError, one_line
from ampfuse.experiments.data.sets import ImageSet, Pixels, checked, resized

# Images and labels of each split, as published.
_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_ALL = [name for pair in _FILES.values() for name in pair]
EXPECTED = ", ".join(_ALL) + " (each with or without .gz, in the folder or in MNIST/raw below it)"


def load(folder: Path, image_size: int) -> ImageSet | None:
    """MNIST from `folder`, resized to `image_size`; None if none of its files is there.

    Raises:
        DataError: some files are missing, or damaged.
    """
    found = {name: path for name in _ALL if (path := _find(folder, name))}
    if not found:
        return None
    if missing := [name for name in _ALL if name not in found]:
        raise DataError(f"--data {folder}: MNIST lacks {', '.join(missing)} (or with .gz)")

    kind = KINDS["mnist"]

    def split(name: str) -> Pixels:
        images_file, labels_file = (found[part] for part in _FILES[name])
        images, labels = read(images_file, dimensions=3), read(labels_file, dimensions=1)
        if len(images) != len(labels):
            raise DataError(
                f"{images_file} has {len(images)} images, but {labels_file} {len(labels)} labels: "
                "they do not belong together"
            )
        images = resized(images[:, None], image_size)
        return checked(images, labels.long(), kind.classes, labels_file)

    return ImageSet(split("train"), split("test"), kind.classes, kind.channels, kind.mean, kind.std)


def read(path: Path, dimensions: int) -> Tensor:
    """An IDX file of bytes: uint8 of as many dimensions as said.

    Raises:
        DataError: it cannot be read, is no such file, or is not as long as it says.
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: damaged or not readable ({one_line(error)}): fetch it again"
        ) from error
    header = 4 + 4 * dimensions
    # Two zeros, the code of unsigned bytes, the number of dimensions; then each one's size.
    if len(content) < header or content[:4] != bytes((0, 0, 8, dimensions)):
        raise DataError(f"{path}: no IDX file of bytes with {dimensions} dimensions")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    length = header + torch.Size(shape).numel()
    if len(content) != length:
        raise DataError(f"{path}: {len(content)} bytes, but {length} by its header: fetch it again")
    if length == header:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header).view(shape)


def _find(folder: Path, name: str) -> Path | None:
    places = (folder, folder / "MNIST" / "raw", folder / "raw")
    files = (place / (name + end) for place in places for end in ("", ".gz"))
    return next((file for file in files if file.is_file()), None)
