"""A data set before any loader: images in memory, or the paths of their files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import functional

from ampfuse.experiments.data.request import DataError, one_line

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclasses.dataclass(frozen=True)
class Pixels:
    """Images in memory: uint8 [n, channels, size, size]; labels int64 [n]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def open(self, index: int) -> Tensor:
        """uint8 [channels, size, size]."""
        return self.images[index]


@dataclasses.dataclass(frozen=True)
class ImageFiles:
    """Image files of any size; labels int64 [n]."""

    paths: Sequence[str]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def open(self, index: int) -> Image:
        """The image, decoded, in RGB. Raises DataError, which names the file, if that fails."""
        from torchvision.datasets.folder import pil_loader

        path = self.paths[index]
        try:
            return pil_loader(path)
        # Damaged files make the decoders raise nearly anything.
        except Exception as error:
            raise DataError(f"{path}: cannot be read as an image ({one_line(error)})") from error


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """Training and test images. `mean` and `std` are per channel, as shares of 255."""

    train: Pixels | ImageFiles
    test: Pixels | ImageFiles
    classes: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def resized(images: Tensor, size: int) -> Tensor:
    """uint8 [n, c, h, w] as uint8 [n, c, size, size]: bilinear, with antialiasing."""
    if images.shape[2:] == (size, size):
        return images
    # On bytes: several times faster than by way of floats, and at most one of 255 off.
    return functional.interpolate(images, (size, size), mode="bilinear", antialias=True)


def checked(images: Tensor, labels: Tensor, classes: int, file: Path) -> Pixels:
    """Both as :class:`Pixels`.

    Raises:
        DataError: there are no images, or labels that are no class. It names `file`.
    """
    if len(labels) == 0:
        raise DataError(f"{file}: holds no images")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise DataError(f"{file}: damaged: label {wrong} is not one of 0 to {classes - 1}")
    return Pixels(images, labels)
