"""MNIST, CIFAR-10 and ImageNet from their published files, by torchvision."""

from __future__ import annotations

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
        how = "read" if kind == "imagenet" else "read or downloaded (delete what is damaged)"
        raise DataError(
            f"--data {place}: {PUBLISHED[kind].title} could not be {how}: {error}; "
            f"expected: {_EXPECTED[kind]}; or give --data digits or synthetic"
        ) from error


def _small(kind: str, folder: Path, image_size: int) -> ImageSet:
    from torchvision.datasets import CIFAR10, MNIST

    class FlatMNIST(MNIST):
        raw_folder = property(lambda self: str(self.root))

    flat = any(folder.glob("*-ubyte*"))
    source = CIFAR10 if kind == "cifar10" else FlatMNIST if flat else MNIST
    folder.mkdir(parents=True, exist_ok=True)
    pixels, facts = [], PUBLISHED[kind]
    for train in (True, False):
        part = source(folder, train=train, download=True)
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
