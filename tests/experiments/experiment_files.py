"""Small data sets in the true formats of MNIST, CIFAR-10 and ImageNet, and what stands in them; and
made-up result files, for the tests of tables and figures."""

import copy
import gzip
import json
import os
import pickle
import shutil
import struct
import tarfile
from pathlib import Path
from typing import Any
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


# --- result files -------------------------------------------------------------------------------


class ResultFolder:
    """Writes result files below `path`. :meth:`add` takes what is to differ from the defaults, a
    field or one of its conditions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = 0

    def add(self, **changes: Any) -> Path:
        """One run of 100 iterations in 5 s."""
        self._files += 1
        result = copy.deepcopy(_RESULT)
        result["finished"] = f"2026-11-21T04:00:{self._files % 60:02}+00:00"
        result["seed"] = changes.get("repeat", 0)
        for name, value in changes.items():
            (result if name in result else result["conditions"])[name] = value
        path = self.path / result["gpu"] / f"run{self._files}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, allow_nan=False))
        return path

    def add_repeats(self, times: list[float], **changes: Any) -> None:
        """Repeats that took `times` in seconds."""
        for repeat, seconds in enumerate(times):
            self.add(repeat=repeat, time_s=seconds, **changes)


def divergence(step: int = 31) -> dict[str, Any]:
    return {"step": step, "reason": "the training loss became nan"}


_RESULT = {
    "format": 3,
    "recipe": "e1",
    "experiment": "cifar",
    "model": "vgg16",
    "variant": "FP32",
    "gpu": "T4",
    "batch_size": 128,
    "optimizer": "sgd",
    "repeat": 0,
    "seed": 0,
    "iterations": 100,
    "epochs": 6.25,
    "time_s": 5.0,
    "memory_mb": 1500.0,
    "memory_kind": "max_memory_allocated",
    "accuracy_pct": 41.0,
    "loss_last": 1.5,
    "loss_mean": 1.8,
    "images_per_s": 2560.0,
    "images_per_s_min": 2100.0,
    "images_per_s_max": 2600.0,
    "loss_scale": 1.0,
    "skipped_steps": 0,
    "diverged": None,
    "conditions": {
        "precision": "fp32",
        "data": "synthetic",
        "kind": "cifar10",
        "loader": "resident",
        "workers": None,
        "graph": False,
        "lr": 0.01,
        "world_size": 1,
        "device": "Tesla T4",
        "torch": "2.14.1",
        "ampfuse": "0.1.0",
        "cuda": "13.0",
    },
    "finished": "",
}
