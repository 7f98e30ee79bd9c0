"""What the perceptron of torch's AMP recipe is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ampfuse.experiments.settings import Settings


class NormalFeatures:
    """The recipe's data: features and targets from a normal distribution, float32 [b, 4096] each,
    drawn once, on the device. They come in one order."""

    classes, channels = 0, 1
    _TEST_BATCHES = 4

    def __init__(self, settings: Settings, device: torch.device) -> None:
        size, self.image_size = settings.batch_size, settings.image_size
        self.batches_per_epoch = max(1, settings.synthetic_size // size)
        self.train_size, self.test_size = size * self.batches_per_epoch, size * self._TEST_BATCHES
        shape = (2, size, self.image_size**2)
        generator = torch.Generator().manual_seed(settings.seed)
        self._train, self._test = (
            [tuple(torch.randn(shape, generator=generator).to(device)) for _ in range(count)]
            for count in (self.batches_per_epoch, self._TEST_BATCHES)
        )

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        return iter(self._train[start:])

    def test_batches(self) -> Iterator[tuple[Tensor, ...]]:
        return iter(self._test)

    def describe(self) -> dict[str, Any]:
        sizes = {"train_size": self.train_size, "test_size": self.test_size}
        return {"data": "synthetic", "kind": "features", "workers": None, **sizes}
