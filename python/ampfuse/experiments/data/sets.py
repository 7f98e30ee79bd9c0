"""A data set before any loader: images in memory, or the paths of their files.

MNIST, CIFAR-10 and ImageNet come from their published files. Two sets need none: scikit-learn's
digits, enlarged, and synthetic images.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ampfuse.command_line import UsageError
from ampfuse.experiments.settings import Settings

if TYPE_CHECKING:
    from PIL.Image import Image


class DataError(UsageError):
    """Data that is missing, damaged or too much. The message is one line: what, and what to do."""

    def __init__(self, message: str) -> None:
        own = message.rpartition(f"{type(self).__name__}: ")[2]  # from a worker it has a traceback
        super().__init__(" ".join(own.split()))


class Facts(NamedTuple):
    """What is known of the images of a set; `mean` and `std` are per channel, as shares of 255."""

    title: str
    channels: int
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


PUBLISHED = {
    "mnist": Facts("MNIST", 1, 10, (0.1307,), (0.3081,)),
    "cifar10": Facts("CIFAR-10", 3, 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagenet": Facts("ImageNet", 3, 1000, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclasses.dataclass(frozen=True)
class Pixels:
    """Images in memory: uint8 [n, channels, size, size]; labels int64 [n]."""

    images: Tensor
    labels: Tensor

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index]

    def resized(self, size: int) -> Pixels:
        """Images of `size` by `size` pixels: bilinear, with antialiasing."""
        if self.images.shape[2:] == (size, size):
            return self
        # On bytes: several times faster than by way of floats, and at most one of 255 off.
        images = functional.interpolate(self.images, (size, size), mode="bilinear", antialias=True)
        return Pixels(images, self.labels)


@dataclasses.dataclass(frozen=True)
class ImageFiles:
    """Image files of any size; labels int64 [n]."""

    paths: Sequence[str]
    labels: Tensor

    def __getitem__(self, index: int) -> Image:
        from torchvision.datasets.folder import pil_loader

        try:
            return pil_loader(self.paths[index])
        # Damaged files make the decoders raise nearly anything.
        except Exception as error:
            said = f"{self.paths[index]}: cannot be read as an image ({error})"
            raise DataError(said) from error


class ImageSet(NamedTuple):
    train: Pixels | ImageFiles
    test: Pixels | ImageFiles
    facts: Facts


def seed_of(*what: object) -> int:
    """63 bits that depend on `what`, strings and integers, and on nothing else."""
    # Sums of seed and epoch would give one seed's second epoch to the next seed's first.
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*what: object) -> torch.Generator:
    """A CPU generator: the same numbers whatever the device of the training."""
    return torch.Generator().manual_seed(seed_of(*what))


# ---- published files, by torchvision -------------------------------------------------------------

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


# ---- scikit-learn's digits -----------------------------------------------------------------------

_TEST_DIGITS = 360


def digits(image_size: int) -> ImageSet:
    """1437 grey images to train and 360 to test, of 8x8 pixels, enlarged. The split is fixed and
    stratified, so that runs with different seeds are tested on the same images."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    pixels, labels = datasets.load_digits(return_X_y=True)
    options = {"test_size": _TEST_DIGITS, "stratify": labels, "random_state": 0}
    train, test = train_test_split(range(len(labels)), **options)
    grey = (torch.as_tensor(pixels).view(-1, 1, 8, 8) * (255 / 16)).round().byte()
    images = Pixels(grey, torch.as_tensor(labels, dtype=torch.int64)).resized(image_size)
    parts = [Pixels(images.images[part], images.labels[part]) for part in (train, test)]
    std, mean = torch.std_mean(parts[0].images.double() / 255, correction=0)
    return ImageSet(*parts, Facts("digits", 1, 10, (mean.item(),), (std.item(),)))


# ---- synthetic images ----------------------------------------------------------------------------

TEST_BATCHES = 4  # their evaluation is for show


def synthetic(kind: str, settings: Settings, world_size: int) -> ImageSet:
    """Noise in the shape of `kind`, of the seed alone.

    Training images are `synthetic_size`, or a batch per process if that is more; test images a
    quarter of them, or four batches per process if that is less.
    """
    facts, size = PUBLISHED[kind], settings.image_size
    together = settings.batch_size * world_size
    train_size = max(settings.synthetic_size, together)
    random = generator("synthetic", settings.seed)

    def draw(count: int) -> Pixels:
        shape = (count, facts.channels, size, size)
        pixels = torch.randint(256, shape, dtype=torch.uint8, generator=random)
        return Pixels(pixels, torch.randint(facts.classes, (count,), generator=random))

    train, test = draw(train_size), draw(min(-(-train_size // 4), TEST_BATCHES * together))
    return ImageSet(train, test, facts._replace(mean=(0.5,), std=(0.29,)))
