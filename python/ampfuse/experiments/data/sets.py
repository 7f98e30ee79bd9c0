"""A data set before any loader: images in memory, or the paths of their files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from PIL.Image import Image
from torch import Tensor
from torch.nn import functional

from ampfuse.experiments.config import UsageError


class DataError(UsageError):
    """Data that is missing, damaged or too much. The message is one line: what, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


# Which set a trainer's folder of --data has to hold, and what its synthetic images look like.
KIND_OF = {"cifar": "cifar10", "imagenet": "imagenet", "mnist": "mnist", "mlp": "mnist"}


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
