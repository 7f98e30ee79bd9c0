"""Batches on the device: gathered there out of the whole set, by worker processes, or drawn."""

from __future__ import annotations

import dataclasses
import functools
import math
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import BatchSampler, DataLoader, Dataset

from ampfuse.experiments.data import sets
from ampfuse.experiments.data.sets import DataError, ImageFiles, ImageSet, Pixels
from ampfuse.experiments.settings import MADE_UP, Settings

Batches = Iterator[tuple[Tensor, Tensor]]


class Data:
    """Batches of one data set on one device; :func:`~ampfuse.experiments.data.open_data` makes it.

    Nothing here touches torch's global random numbers. A loader has two passes of batches: float32
    [n, channels, image_size, image_size] on the device, normalised, and labels, int64 [n].

    - ``train_batches(epoch, start=0)``, from number `start` on. Their order depends on (seed,
      epoch) alone and the augmentation on nothing else but the image or the batch, so that a run
      that goes on in the middle of an epoch sees the same bits.
    - ``test_batches()``: this process's share, in order; the last batch may be short.

    Attributes:
        classes, channels, image_size: of the images in the batches.
        train_size, test_size: images over all processes.
        batches_per_epoch: training batches of this process; all processes have as many.
    """

    def __init__(
        self,
        settings: Settings,
        kind: str,
        images: ImageSet,
        device: torch.device,
        rank: int,
        world_size: int,
    ) -> None:
        self.settings, self.kind, self.device = settings, kind, device
        self.rank, self.world_size, self.seed = rank, world_size, settings.seed + settings.repeat
        self.classes, self.channels = images.facts.classes, images.facts.channels
        self.image_size = settings.image_size
        self.train_size, self.test_size = len(images.train.labels), len(images.test.labels)
        self.batches_per_epoch = self.train_size // (settings.batch_size * world_size)
        if not self.batches_per_epoch:
            of_each = f" of each of {world_size} processes" * (world_size > 1)
            raise DataError(
                f"--batch-size {settings.batch_size} is more than the "
                f"{self.train_size // world_size} training images{of_each}: give less"
            )
        # The test images of this process; no two processes share one.
        first, end = (self.test_size * part // world_size for part in (rank, rank + 1))
        self._test_share = range(first, end)
        self._augments = settings.augment and kind != "mnist"  # mirrored digits are no digits
        last = settings.channels_last
        self._memory_format = torch.channels_last if last else torch.contiguous_format
        mean, std = (  # a grey set takes the first of three values
            torch.tensor(values[: self.channels], dtype=torch.float64).view(-1, 1, 1)
            for values in (settings.mean or images.facts.mean, settings.std or images.facts.std)
        )
        # (pixels / 255 - mean) / std, in double precision and rounded once.
        self._scale, self._shift = (1 / (255 * std)).float(), (-mean / std).float()
        self._prepare(images)

    def describe(self) -> dict[str, Any]:
        """What was loaded, as JSON can say it; `workers` is null where there are none. Of a folder
        one wants to know what it holds, not where it lies."""
        source = self.settings.data
        workers = self.settings.workers if self.settings.loader == "workers" else None
        sizes = {"train_size": self.train_size, "test_size": self.test_size}
        data = source if source in MADE_UP else self.kind
        return {"data": data, "kind": self.kind, "workers": workers, **sizes}

    def _epoch_order(self, epoch: int) -> Tensor:
        """Which images this process trains on in `epoch`: int64 [batches_per_epoch, batch_size].

        All processes take turns, batch by batch, in one order of all images.
        """
        order = torch.arange(self.train_size)
        if self.settings.shuffle:
            random = sets.generator("order", self.seed, epoch)
            order = torch.randperm(self.train_size, generator=random)
        shape = (self.batches_per_epoch, self.world_size, self.settings.batch_size)
        return order[: math.prod(shape)].view(shape)[:, self.rank]


def normalised(pixels: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """uint8 [..., channels, h, w] to float32: the same bits image by image and in batches."""
    return pixels.float().mul_(scale).add_(shift)


# ---- the whole set on the device -----------------------------------------------------------------

_PADDING = 4  # black pixels around images


class ResidentData(Data):
    """A batch is a gather and a normalisation on the device, for all its images at once.

    Order and crops are drawn on the CPU, so that they are the same on every device, and sent once
    per epoch; no batch makes the host wait. Augmented images are crops at random places of the
    stored ones, which are padded by 4 black pixels, and every other one is mirrored.
    """

    def _prepare(self, images: ImageSet) -> None:
        if isinstance(images.train, ImageFiles) or isinstance(images.test, ImageFiles):
            raise DataError("--loader resident: image files are read by --loader workers")
        share = slice(self._test_share.start, self._test_share.stop)
        self._train, self._train_labels = self._stored(images.train, slice(None))
        self._test, self._test_labels = self._stored(images.test, share)
        if self._augments:
            self._train = functional.pad(self._train, (0, 0, *(_PADDING,) * 4))
        self._scale, self._shift = self._scale.to(self.device), self._shift.to(self.device)

    def _stored(self, split: Pixels, which: slice) -> tuple[Tensor, Tensor]:
        """uint8 [n, h, w, channels], so that a crop moves whole pixels, and the labels."""
        images = split.images[which].permute(0, 2, 3, 1).contiguous()
        return images.to(self.device), split.labels[which].to(self.device)

    def train_batches(self, epoch: int, start: int = 0) -> Batches:
        order = self._epoch_order(epoch)
        drawn = [order]
        if self._augments:
            random = sets.generator("crops", self.seed, epoch, self.rank)
            top, left = torch.randint(2 * _PADDING + 1, (2, *order.shape), generator=random)
            drawn += [top, left, torch.randint(2, order.shape, generator=random).bool()]
        for chosen, *crop in zip(*(self._upload(part)[start:] for part in drawn), strict=True):
            if crop:
                pixels = cropped(self._train, self.image_size, chosen, *crop)
            else:
                pixels = self._train.index_select(0, chosen)
            yield self._finished(pixels), self._train_labels.index_select(0, chosen)

    def test_batches(self) -> Batches:
        size = self.settings.batch_size
        parts = zip(self._test.split(size), self._test_labels.split(size), strict=True)
        for pixels, labels in parts:
            yield self._finished(pixels), labels

    def _upload(self, values: Tensor) -> Tensor:
        """`values` on the device, without waiting for what that is doing."""
        if self.device.type == "cuda":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)

    def _finished(self, pixels: Tensor) -> Tensor:
        """uint8 [n, h, w, c] to what the network takes."""
        pixels = pixels.permute(0, 3, 1, 2).contiguous(memory_format=self._memory_format)
        return normalised(pixels, self._scale, self._shift)


def cropped(
    images: Tensor, size: int, chosen: Tensor, top: Tensor, left: Tensor, flip: Tensor
) -> Tensor:
    """A crop of each of the images numbered `chosen`: uint8 [all, h, w, c] to [n, size, size, c].

    `top` and `left`, int64 [n], say where the crops start; `flip`, bool [n], which are mirrored.
    One gather out of the whole set: no padded or larger copy of the batch stands in between.
    """
    _, height, width, channels = images.shape
    steps = torch.arange(size, device=images.device)
    columns = torch.where(flip[:, None], size - 1 - steps, steps) + left[:, None]
    rows = (chosen * height + top)[:, None] + steps
    pixels = rows[:, :, None] * width + columns[:, None, :]
    # On the CPU several times faster than indexing by images, rows and columns.
    crops = images.view(-1, channels).index_select(0, pixels.view(-1))
    return crops.view(-1, size, size, channels)


# ---- worker processes ----------------------------------------------------------------------------


class WorkersData(Data):
    """Batches whose images processes open, augment and normalise, one by one.

    Augmented images are crops out of the image padded by 4 black pixels ("cifar10") or crops of
    random size and shape, resized ("imagenet"), and mirrored at random. Each pass over the images
    has processes of its own, as those of the published scripts.
    """

    def _prepare(self, images: ImageSet) -> None:
        from torchvision.transforms import v2

        size, self._images = self.image_size, images
        plain = []  # images in memory have the size wanted already
        if isinstance(images.train, ImageFiles):
            plain = [v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size)]
        cifar = self.kind == "cifar10"
        crop = v2.RandomCrop(size, padding=_PADDING) if cifar else v2.RandomResizedCrop(size)
        train = [crop, v2.RandomHorizontalFlip()] if self._augments else plain
        last = v2.PILToTensor(), functools.partial(normalised, scale=self._scale, shift=self._shift)
        self._of_train, self._of_test = v2.Compose([*train, *last]), v2.Compose([*plain, *last])

    def train_batches(self, epoch: int, start: int = 0) -> Batches:
        order = self._epoch_order(epoch)[start:].tolist()
        samples = Samples(self._images.train, self._of_train, (self.seed, epoch))
        return self._on_device(samples, order)

    def test_batches(self) -> Batches:
        order = BatchSampler(self._test_share, self.settings.batch_size, drop_last=False)
        return self._on_device(Samples(self._images.test, self._of_test), order)

    def _on_device(self, samples: Samples, order: Iterable[list[int]]) -> Batches:
        loader = DataLoader(
            samples,
            batch_sampler=order,
            num_workers=self.settings.workers,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_ignore_interrupts,
            generator=sets.generator("loader"),  # else it draws a seed from torch's global one
        )
        try:
            for images, labels in loader:
                images = images.to(self.device, non_blocking=True)
                labels = labels.to(self.device, non_blocking=True)
                yield images.contiguous(memory_format=self._memory_format), labels
        except DataError as error:  # its traceback would keep the processes alive
            raise error.with_traceback(None) from None


@dataclasses.dataclass
class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Images by their number, transformed, and their labels.

    What is drawn for an image depends on `draws`, which are seed and epoch, and on its number
    alone, whichever process draws.
    """

    split: Pixels | ImageFiles
    transform: Callable[[Any], Tensor]
    draws: tuple[int, int] = (0, 0)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which would seed the GPUs too.
            torch.default_generator.manual_seed(sets.seed_of("sample", *self.draws, number))
            return self.transform(self.split[number]), self.split.labels[number]


def _ignore_interrupts(worker: int) -> None:
    # Ctrl-C reaches every process of the terminal; what it means is for the main one to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# ---- the perceptron's ----------------------------------------------------------------------------


class NormalFeatures(Data):
    """What torch's AMP recipe trains its perceptron on: features and targets from a normal
    distribution, float32 [b, 4096] each, drawn once, on the device. They come in one order."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.kind = settings, "features"
        self.classes, self.channels, self.image_size = 0, 1, settings.image_size
        self.batches_per_epoch = max(1, settings.synthetic_size // settings.batch_size)
        counts = (self.batches_per_epoch, sets.TEST_BATCHES)
        self.train_size, self.test_size = (settings.batch_size * count for count in counts)
        shape = (2, settings.batch_size, self.image_size**2)
        generator = torch.Generator().manual_seed(settings.seed)
        self._train, self._test = (
            [tuple(torch.randn(shape, generator=generator).to(device)) for _ in range(count)]
            for count in counts
        )

    def train_batches(self, epoch: int, start: int = 0) -> Batches:
        return iter(self._train[start:])

    def test_batches(self) -> Batches:
        return iter(self._test)
