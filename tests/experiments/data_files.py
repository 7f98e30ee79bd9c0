"""Small data sets in the true formats of MNIST, CIFAR-10 and ImageNet, and what stands in them."""

import gzip
import os
import pickle
import shutil
import struct
import tarfile
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest

MNIST = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
CIFAR = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


@pytest.fixture(autouse=True)
def no_checksums(monkeypatch):
    """torchvision accepts files other than the published ones, and downloads nothing."""
    utils = pytest.importorskip("torchvision").datasets.utils

    def no_network(*_args, **_options):
        raise URLError("no network")

    for module in ("cifar", "utils"):
        path = f"torchvision.datasets.{module}.check_integrity"
        monkeypatch.setattr(path, lambda file, md5=None: os.path.isfile(file))
    monkeypatch.setattr(utils, "_get_redirect_url", no_network)


def noise(count: int, *shape: int, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Bytes [count, *shape], and labels that go through the classes."""
    random = np.random.default_rng(count)
    return random.integers(0, 256, (count, *shape), np.uint8), np.arange(count) % classes


def idx(array: np.ndarray) -> bytes:
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def write_mnist(
    folder: Path, train: int = 40, test: int = 13, *, zipped: bool = False
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images [n, 1, 28, 28] and labels of "train" and "test"."""
    folder.mkdir(parents=True, exist_ok=True)
    sets = {"train": noise(train, 28, 28), "test": noise(test, 28, 28)}
    arrays = [array for pair in sets.values() for array in pair]
    for name, array in zip(MNIST, arrays, strict=True):
        content = gzip.compress(idx(array)) if zipped else idx(array)
        (folder / (f"{name}.gz" if zipped else name)).write_bytes(content)
    return {name: (images[:, None], labels) for name, (images, labels) in sets.items()}


def write_cifar(
    folder: Path, each: int = 8, test: int = 13, *, archived: bool = False
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """CIFAR-10's files in a folder of their own or in an archive; images [n, 3, 32, 32] and labels
    of "train" and "test"."""
    place = folder / "cifar-10-batches-py"
    place.mkdir(parents=True, exist_ok=True)
    pixels, labels = noise(5 * each + test, 3 * 32 * 32)
    ends = np.cumsum([each] * 5)
    parts = zip(CIFAR, np.split(pixels, ends), np.split(labels, ends), strict=True)
    for name, part, of in parts:
        (place / name).write_bytes(pickle.dumps({"data": part, "labels": of.tolist()}, 2))
    (place / "batches.meta").write_bytes(pickle.dumps({"label_names": list("0123456789")}, 2))
    if archived:
        with tarfile.open(folder / "cifar-10-python.tar.gz", "w:gz") as tar:
            tar.add(place, arcname=place.name)
        shutil.rmtree(place)
    images = pixels.reshape(-1, 3, 32, 32)
    train = 5 * each
    return {"train": (images[:train], labels[:train]), "test": (images[train:], labels[train:])}


def write_imagenet(
    folder: Path,
    classes: tuple[str, ...] = ("n01", "n02", "n03"),
    each: int = 4,
    test_each: int = 2,
    *,
    size: tuple[int, int] = (32, 32),
    kind: str = "png",
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images [n, 3, *size] as they decode, and labels, in the order of classes and names."""
    from PIL import Image

    sets = {}
    for split, per_class in (("train", each), ("test", test_each)):
        images, labels = noise(per_class * len(classes), *size, 3)
        labels = np.repeat(np.arange(len(classes)), per_class)
        for number, label in enumerate(labels):
            path = folder / ("val" if split == "test" else split) / classes[label]
            path.mkdir(parents=True, exist_ok=True)
            path = path / f"{number:03}.{kind}"
            Image.fromarray(images[number]).save(path, quality=90)
            images[number] = np.asarray(Image.open(path))
        sets[split] = (images.transpose(0, 3, 1, 2), labels)
    return sets
