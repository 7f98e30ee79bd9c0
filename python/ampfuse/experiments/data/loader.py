"""What every loader offers, and what a set and a request have to agree on first."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ampfuse.experiments.data import order
from ampfuse.experiments.data.normalise import Normalisation
from ampfuse.experiments.data.request import DataError, DataRequest
from ampfuse.experiments.data.sets import ImageSet


class Data(abc.ABC):
    """Batches of one data set on one device; :func:`~ampfuse.experiments.data.open_data` makes it.

    Nothing here touches torch's global random numbers.

    Attributes:
        classes, channels, image_size: of the images in the batches.
        train_size, test_size: images over all processes.
        batches_per_epoch: training batches of this process; all processes have as many.
    """

    def __init__(self, request: DataRequest, images: ImageSet) -> None:
        self.request = request
        self.classes, self.channels = images.classes, images.channels
        self.image_size = request.image_size
        self.train_size, self.test_size = len(images.train), len(images.test)
        self.batches_per_epoch = self.train_size // (request.batch_size * request.world_size)
        if not self.batches_per_epoch:
            of_each = f" of each of {request.world_size} processes" * (request.world_size > 1)
            raise DataError(
                f"--batch-size {request.batch_size} is more than the "
                f"{self.train_size // request.world_size} training images{of_each}: give less"
            )
        self._normalise = Normalisation.of(request, images)

    @abc.abstractmethod
    def train_batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of `epoch` from number `start` on.

        The order depends on (seed, epoch) alone and the augmentation on nothing else but the image
        or the batch, so that a run that goes on in the middle of an epoch sees the same bits.

        Yields:
            float32 [batch_size, channels, image_size, image_size] on the device, normalised, and
            int64 [batch_size] labels.
        """

    @abc.abstractmethod
    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of the test images, in their order; the last batch may be short."""

    def describe(self) -> dict[str, Any]:
        """What was loaded, and how, as JSON can say it; `workers` is null where there are none."""
        request = self.request
        return {
            "source": request.source,
            "kind": request.kind,
            "loader": request.loader,
            "workers": request.workers if request.loader == "workers" else None,
            "train_size": self.train_size,
            "test_size": self.test_size,
            "image_size": self.image_size,
            "augment": request.augment,
            "shuffle": request.shuffle,
            "device_bytes": self.device_bytes,
        }

    @property
    def device_bytes(self) -> int:
        """What the set itself takes of the device's memory, whatever the batches take."""
        return 0

    def reseed(self, seed: int) -> None:
        """Order and augmentation of another seed from here on; the images stay, synthetic ones too.

        For repeats: nothing is read, decoded or started again.
        """
        self.request = dataclasses.replace(self.request, seed=seed)

    def close(self) -> None:  # noqa: B027 (not every loader has something to end)
        """End what was started, worker processes for example. Repeating it does no harm."""

    def _epoch_order(self, epoch: int) -> Tensor:
        """int64 [batches_per_epoch, batch_size]."""
        request = self.request
        return order.epoch_order(
            self.train_size,
            batch_size=request.batch_size,
            rank=request.rank,
            world_size=request.world_size,
            shuffle=request.shuffle,
            seed=request.seed,
            epoch=epoch,
        )

    @property
    def _test_share(self) -> range:
        return order.share(self.test_size, self.request.rank, self.request.world_size)

    @property
    def _memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.request.channels_last else torch.contiguous_format
