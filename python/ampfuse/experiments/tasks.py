"""What each trainer trains: its data, its models, its loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampfuse.experiments import models
from ampfuse.experiments.config import RunConfig, UsageError
from ampfuse.experiments.data import Data, open_data

if TYPE_CHECKING:
    from ampfuse.experiments.distributed import World


class Task:
    """Classification of images; other tasks override its methods."""

    def open_data(self, config: RunConfig, device: torch.device, world: World) -> Data:
        """The data of all repeats of `config`; ``reseed`` turns to one of them."""
        return open_data(config, device, rank=world.rank, world_size=world.size)

    def build_model(self, config: RunConfig, data: Data) -> nn.Module:
        of_data = {name: getattr(data, name) for name in ("classes", "channels", "image_size")}
        try:
            return models.build(config.model, dropout=config.dropout, **of_data)
        except ValueError as error:
            raise UsageError(f"--model {config.model}: {error}") from error

    def example(self, config: RunConfig, data: Data, device: torch.device) -> tuple[Tensor, Tensor]:
        """A batch of noise in the shape of the training batches, to warm up with."""
        generator = torch.Generator().manual_seed(0)
        shape = (config.batch_size, data.channels, data.image_size, data.image_size)
        layout = torch.channels_last if config.channels_last else torch.contiguous_format
        images = torch.randn(shape, generator=generator).to(device, memory_format=layout)
        labels = torch.randint(data.classes, shape[:1], generator=generator).to(device)
        return images, labels

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """How many of the batch were right (0-dim), or None where that means nothing."""
        return (outputs.argmax(dim=1) == targets).sum()


class FeatureTask(Task):
    """Regression on 4096 features, the workload of torch's AMP recipe.

    Its synthetic data are the recipe's: inputs and targets from a normal distribution, FP32 on the
    device, with the mean squared error. Images (digits, MNIST) come as 64x64 pixels, with the class
    as a vector of 4096, so that the net stays the same.
    """

    def open_data(self, config: RunConfig, device: torch.device, world: World) -> Data:
        if config.data != "synthetic":
            return super().open_data(config, device, world)
        return NormalFeatures(config, device, world)  # type: ignore[return-value]

    def example(self, config: RunConfig, data: Data, device: torch.device) -> tuple[Tensor, Tensor]:
        if isinstance(data, NormalFeatures):
            return next(data.train_batches(0))
        return super().example(config, data, device)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if not targets.is_floating_point():
            targets = F.one_hot(targets, outputs.shape[1]).to(outputs.dtype)
        return F.mse_loss(outputs, targets)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        return None if targets.is_floating_point() else super().correct(outputs, targets)


class NormalFeatures:
    """Batches of features and targets, float32 [b, 4096] each, drawn once, on the device."""

    _TEST_BATCHES = 4

    def __init__(self, config: RunConfig, device: torch.device, world: World) -> None:
        size = config.batch_size * world.size
        self.batches_per_epoch = max(1, config.synthetic_size // size)
        self.channels, self.image_size = 1, config.image_size
        self.classes = config.image_size**2
        self.train_size, self.test_size = size * self.batches_per_epoch, size * self._TEST_BATCHES
        shape = (2, config.batch_size, self.classes)
        generator = torch.Generator().manual_seed(config.seed + 1000 * world.rank)
        self._train, self._test = (
            [tuple(torch.randn(shape, generator=generator).to(device)) for _ in range(count)]
            for count in (self.batches_per_epoch, self._TEST_BATCHES)
        )

    def reseed(self, seed: int) -> None:
        """The recipe's batches come in one order."""

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, ...]]:
        return iter(self._train[start:])

    def test_batches(self) -> Iterator[tuple[Tensor, ...]]:
        return iter(self._test)

    def describe(self) -> dict[str, Any]:
        sizes = {"train_size": self.train_size, "test_size": self.test_size}
        return {"source": "synthetic", "kind": "features", "loader": "resident", **sizes}

    def close(self) -> None:
        """Nothing was opened."""


TASKS = {"cifar": Task(), "imagenet": Task(), "mnist": Task(), "mlp": FeatureTask()}
