"""What both loaders have in common: order and normalisation of the images, random numbers."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from ampfuse.experiments.config import RunConfig
from ampfuse.experiments.data.sets import DataError, ImageSet


def seed_of(*what: object) -> int:
    """63 bits that depend on `what`, strings and integers, and on nothing else."""
    # Sums of seed and epoch would give one seed's second epoch to the next seed's first.
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*what: object) -> torch.Generator:
    """A CPU generator: the same numbers whatever the device of the training."""
    return torch.Generator().manual_seed(seed_of(*what))


def normalised(pixels: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """uint8 [..., channels, h, w] to float32: the same bits image by image and in batches."""
    return pixels.float().mul_(scale).add_(shift)


class Data:
    """Batches of one data set on one device; :func:`~ampfuse.experiments.data.open_data` makes it.

    Nothing here touches torch's global random numbers. A loader has ``_prepare(images)`` and two
    passes of batches: float32 [n, channels, image_size, image_size] on the device, normalised, and
    labels, int64 [n].

    - ``train_batches(epoch, start=0)``, from number `start` on. Their order depends on (seed,
      epoch) alone and the augmentation on nothing else but the image or the batch, so that a run
      that goes on in the middle of an epoch sees the same bits.
    - ``test_batches()``: this process's share, in order; the last batch may be short.

    Attributes:
        classes, channels, image_size: of the images in the batches.
        train_size, test_size: images over all processes.
        batches_per_epoch: training batches of this process; all processes have as many.
        device_bytes: what the set itself takes of the device's memory, whatever the batches take.
    """

    device_bytes = 0

    def __init__(
        self,
        config: RunConfig,
        kind: str,
        images: ImageSet,
        device: torch.device,
        rank: int,
        world_size: int,
    ) -> None:
        self.config, self.kind, self.device = config, kind, device
        self.rank, self.world_size, self.seed = rank, world_size, config.seed
        self.classes, self.channels = images.facts.classes, images.facts.channels
        self.image_size = config.image_size
        self.train_size, self.test_size = len(images.train.labels), len(images.test.labels)
        self.batches_per_epoch = self.train_size // (config.batch_size * world_size)
        if not self.batches_per_epoch:
            of_each = f" of each of {world_size} processes" * (world_size > 1)
            raise DataError(
                f"--batch-size {config.batch_size} is more than the "
                f"{self.train_size // world_size} training images{of_each}: give less"
            )
        # The test images of this process; no two processes share one.
        first, end = (self.test_size * part // world_size for part in (rank, rank + 1))
        self._test_share = range(first, end)
        self._augments = config.augment and kind != "mnist"  # mirrored digits are no digits
        self._memory_format = (
            torch.channels_last if config.channels_last else torch.contiguous_format
        )
        mean, std = (
            torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)
            for values in (config.mean or images.facts.mean, config.std or images.facts.std)
        )
        if self.channels == 1:  # a grey set takes the mean of three values
            mean, std = mean.mean(0, keepdim=True), std.mean(0, keepdim=True)
        # (pixels / 255 - mean) / std, in double precision and rounded once.
        self._scale, self._shift = (1 / (255 * std)).float(), (-mean / std).float()
        self._prepare(images)

    def describe(self) -> dict[str, Any]:
        """What was loaded, and how, as JSON can say it; `workers` is null where there are none."""
        config, sizes = self.config, ("train_size", "test_size", "image_size")
        return {
            "source": config.data,
            "kind": self.kind,
            "loader": config.loader,
            "workers": config.workers if config.loader == "workers" else None,
            **{name: getattr(self, name) for name in sizes},
            "augment": config.augment,
            "shuffle": config.shuffle,
            "device_bytes": self.device_bytes,
        }

    def reseed(self, seed: int) -> None:
        """Order and augmentation of another seed from here on; the images stay as they are."""
        self.seed = seed

    def close(self) -> None:
        """End what was started, worker processes for example."""

    def _epoch_order(self, epoch: int) -> Tensor:
        """Which images this process trains on in `epoch`: int64 [batches_per_epoch, batch_size].

        All processes take turns, batch by batch, in one order of all images.
        """
        order = torch.arange(self.train_size)
        if self.config.shuffle:
            random = generator("order", self.seed, epoch)
            order = torch.randperm(self.train_size, generator=random)
        shape = (self.batches_per_epoch, self.world_size, self.config.batch_size)
        return order[: math.prod(shape)].view(shape)[:, self.rank]
