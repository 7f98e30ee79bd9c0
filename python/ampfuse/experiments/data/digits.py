"""scikit-learn's digits, enlarged: real images that come with a package, for when there is no data.

They stand in for any of the data sets: 1437 grey images to train and 360 to test, ten classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ampfuse.demo.data import read_digits
from ampfuse.experiments.data.sets import ImageSet, Pixels, resized


def load(image_size: int) -> ImageSet:
    """The demo's split of the digits, at `image_size` pixels."""
    pixels, labels, train, test = read_digits()
    images = resized((pixels * (255 / 16)).round().byte(), image_size)
    mean, std = _statistics(images[train])
    return ImageSet(
        train=Pixels(images[train], labels[train]),
        test=Pixels(images[test], labels[test]),
        classes=10,
        channels=1,
        mean=(mean,),
        std=(std,),
    )


def _statistics(images: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of all bytes, as shares of 255."""
    counts = torch.bincount(images.flatten(), minlength=256).double()
    shares = torch.arange(256, dtype=torch.float64) / 255
    mean = (counts * shares).sum() / counts.sum()
    variance = (counts * (shares - mean) ** 2).sum() / counts.sum()
    return mean.item(), variance.sqrt().item()
