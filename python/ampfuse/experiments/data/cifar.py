"""CIFAR-10 in its published layout: six pickled dictionaries, in a folder or still in the archive.

Read here and not by torchvision, which takes the six published files only and unpickles whatever
stands in them.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ampfuse.experiments.data.request import KINDS, DataError, one_line
from ampfuse.experiments.data.sets import ImageSet, Pixels, checked, resized

_FOLDER = "cifar-10-batches-py"
_ARCHIVE = "cifar-10-python.tar.gz"
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = "test_batch"
_ALL = (*_TRAIN, _TEST)
EXPECTED = f"{_FOLDER}/ with {_TRAIN[0]} to {_TRAIN[-1]} and {_TEST}, or {_ARCHIVE}"


def load(folder: Path, image_size: int) -> ImageSet | None:
    """CIFAR-10 from `folder`, resized to `image_size`; None if nothing of it is there.

    Raises:
        DataError: some files are missing, or damaged.
    """
    files = _files(folder)
    if not files:
        return None
    if missing := [name for name in _ALL if name not in files]:
        raise DataError(f"--data {folder}: CIFAR-10 lacks {', '.join(missing)}")
    kind = KINDS["cifar10"]
    batches = {name: read(path, content) for name, (path, content) in files.items()}

    def split(*names: str) -> Pixels:
        parts = [batches[name] for name in names]
        images = resized(torch.cat([part.images for part in parts]), image_size)
        return Pixels(images, torch.cat([part.labels for part in parts]))

    return ImageSet(split(*_TRAIN), split(_TEST), kind.classes, kind.channels, kind.mean, kind.std)


def read(path: Path, content: bytes) -> Pixels:
    """One batch, of any number of images: uint8 [n, 3, 32, 32] and labels.

    Raises:
        DataError: `content` is no such batch; it names `path`.
    """
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
    return checked(images, torch.from_numpy(labels), KINDS["cifar10"].classes, path)


def _files(folder: Path) -> dict[str, tuple[Path, bytes]]:
    """Path and content of the batches found, by name."""
    for place in (folder, folder / _FOLDER):
        paths = {name: place / name for name in _ALL if (place / name).is_file()}
        if paths:
            return {name: (path, path.read_bytes()) for name, path in paths.items()}
    beside = [folder.parent / _ARCHIVE] if folder.name == _FOLDER else []
    archive = next((path for path in (folder, folder / _ARCHIVE, *beside) if path.is_file()), None)
    return _unpacked(archive) if archive else {}


def _unpacked(archive: Path) -> dict[str, tuple[Path, bytes]]:
    found = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = Path(member.name).name
                if member.isfile() and name in _ALL and (file := tar.extractfile(member)):
                    found[name] = (archive / member.name, file.read())
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{archive}: damaged or not readable ({one_line(error)}): fetch it again"
        ) from error
    if not found:
        raise DataError(f"{archive}: holds none of {', '.join(_ALL)}")
    return found


class _Unpickler(pickle.Unpickler):
    """Knows arrays and plain data. A pickle can name any function to call: here, only these."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module.replace("numpy._core", "numpy.core"), name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}") from None


_ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    # Functions without a public name: what rebuilds an array, and a number that NumPy made.
    ("numpy.core.multiarray", "scalar"): np.uint8(0).__reduce__()[0],
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy.core.numeric", "_frombuffer"): np.empty(0).__reduce_ex__(5)[0],
    # How Python 3 writes bytes for Python 2 to read.
    ("_codecs", "encode"): lambda text, encoding: text.encode("latin1"),
}
