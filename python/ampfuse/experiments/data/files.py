"""MNIST, CIFAR-10 and ImageNet from their published files, by torchvision."""

from __future__ import annotations

import fcntl
import math
import os
from pathlib import Path

import torch

from ampfuse.experiments.data.sets import PUBLISHED, DataError, ImageFiles, ImageSet, Pixels

_EXPECTED = {
    "mnist": "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, "
    "t10k-labels-idx1-ubyte (or all with .gz), in the folder or in MNIST/raw below it",
    "cifar10": "cifar-10-batches-py/ or cifar-10-python.tar.gz",
    "imagenet": "train/ and val/, with a folder of JPEG or PNG files for each class",
}


def read_files(kind: str, folder: str, image_size: int) -> ImageSet:
    """The published data set `kind` ("mnist", "cifar10" or "imagenet") out of `folder`.

    MNIST and CIFAR-10 are downloaded if they are not there, and resized to `image_size`. ImageNet
    stays in its files.

    Raises:
        DataError: it is not there, damaged, or could not be downloaded.
    """
    place = Path(folder).expanduser()
    try:
        return _imagenet(place) if kind == "imagenet" else _small(kind, place, image_size)
    # Damaged files make torchvision raise nearly anything, as they make it download others.
    except Exception as error:
        if kind != "imagenet" and (found := _damage(kind, place)):
            told = "--data: {} is damaged ({}): delete it, and it is downloaded again"
            raise DataError(told.format(*found)) from error
        how = "read" if kind == "imagenet" else "read or downloaded"
        raise DataError(
            f"--data {place}: {PUBLISHED[kind].title} could not be {how} ({error}); "
            f"expected: {_EXPECTED[kind]}; or give --data digits or synthetic"
        ) from error


def _damage(kind: str, folder: Path) -> tuple[Path, str] | None:
    """A file of `kind` that is there and is not as it was published, and what is wrong with it."""
    from torchvision.datasets import CIFAR10, MNIST, utils

    raw = folder if any(folder.glob("*-ubyte*")) else folder / "MNIST" / "raw"
    sums = {raw / name: md5 for name, md5 in MNIST.resources}
    if kind == "cifar10":
        meta = CIFAR10.meta["filename"], CIFAR10.meta["md5"]
        parts = [*CIFAR10.train_list, *CIFAR10.test_list, meta]
        sums = {folder / CIFAR10.base_folder / name: md5 for name, md5 in parts}
        sums[folder / CIFAR10.filename] = CIFAR10.tgz_md5
    for file, md5 in sums.items():
        idx = file.with_suffix("")
        if kind == "mnist" and idx.is_file() and (problem := _idx_problem(idx)):
            return idx, problem
        if file.is_file() and not utils.check_integrity(file, md5):
            found = f"{file.stat().st_size} bytes with the MD5 sum {utils.calculate_md5(file)}"
            return file, f"{found}; the published file has {md5}"
    return None


def _idx_problem(file: Path) -> str | None:
    content, ndim = file.read_bytes(), 3 if "idx3" in file.name else 1
    head, start = content[:4].hex(), 4 + 4 * ndim
    size = start + math.prod(int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4))
    if head != f"0000080{ndim}" or len(content) != size:
        return f"{len(content)} bytes from {head!r} on; expected: {size}, from '0000080{ndim}' on"
    if ndim == 1 and (label := max(content[start:], default=0)) > 9:
        return f"the label of image {content.index(label, start) - start} is {label}, not 0 to 9"
    return None


def _small(kind: str, folder: Path, image_size: int) -> ImageSet:
    from torchvision.datasets import CIFAR10, MNIST

    class FlatMNIST(MNIST):
        raw_folder = property(lambda self: str(self.root))

    flat = any(folder.glob("*-ubyte*"))
    source = CIFAR10 if kind == "cifar10" else FlatMNIST if flat else MNIST
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of the processes of a training, one downloads
        parts = [source(folder, train=train, download=True) for train in (True, False)]
    finally:
        os.close(lock)
    pixels, facts = [], PUBLISHED[kind]
    for part in parts:
        images = torch.as_tensor(part.data)
        images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)
        labels = torch.as_tensor(part.targets)
        low, high = labels.min(), labels.max()
        if len(labels) != len(images) or not 0 <= low <= high < facts.classes:
            raise ValueError(f"{len(labels)} labels, {low} to {high}, for {len(images)} images")
        pixels.append(Pixels(images, labels).resized(image_size))
    return ImageSet(*pixels, facts)


def _imagenet(folder: Path) -> ImageSet:
    from torchvision.datasets import ImageFolder
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    train = ImageFolder(folder / "train")
    # By the numbers of train's classes: one without test images does not shift the others.
    test = make_dataset(folder / "val", train.class_to_idx, IMG_EXTENSIONS, allow_empty=True)
    if not test:
        raise FileNotFoundError(f"no images of the classes of train in {folder / 'val'}")
    splits = (zip(*samples, strict=True) for samples in (train.samples, test))
    files = (ImageFiles(paths, torch.tensor(labels)) for paths, labels in splits)
    return ImageSet(*files, PUBLISHED["imagenet"]._replace(classes=len(train.classes)))
