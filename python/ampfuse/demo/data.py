"""scikit-learn's handwritten digits as tensors: 1797 images of 8x8 pixels, ten classes.

They come with the package: nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

_TEST_IMAGES = 360


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images are float32 [n, 1, 8, 8], standardised; labels are int64 [n]."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch of training batches in a new order; images short of a batch are left out.

        `generator` is a CPU one, so the order is the same on every device.
        """
        order = torch.randperm(len(self.train_images), generator=generator)
        order = order.to(self.train_images.device)
        for chosen in order[: len(order) // size * size].split(size):
            yield self.train_images[chosen], self.train_labels[chosen]


def read_digits() -> tuple[Tensor, Tensor, list[int], list[int]]:
    """The digits as they come, and who is to train and who to test.

    The split is fixed and stratified, 1437 to train and 360 to test, so that runs with different
    seeds are tested on the same images.

    Returns:
        pixels, float32 [1797, 1, 8, 8] of values from 0 to 16; labels, int64 [1797]; the numbers
        of the training images; those of the test images.
    """
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    pixels, labels = datasets.load_digits(return_X_y=True)
    train, test = train_test_split(
        range(len(labels)), test_size=_TEST_IMAGES, stratify=labels, random_state=0
    )
    images = torch.as_tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8)
    return images, torch.as_tensor(labels, dtype=torch.int64), train, test


def load_digits(device: torch.device) -> Digits:
    """The digits on `device`, which holds them whole: a loader would be all one measures."""
    images, labels, train, test = read_digits()
    mean, std = images[train].mean(), images[train].std()
    images, labels = ((images - mean) / std).to(device), labels.to(device)
    return Digits(images[train], labels[train], images[test], labels[test])
