"""The usual loader: torch's DataLoader, whose processes open, augment and normalise the images."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, default_collate

from ampfuse.experiments.data.loader import Data, generator, normalised, seed_of
from ampfuse.experiments.data.sets import DataError, ImageFiles, ImageSet, Pixels

# Numbers of a batch's images; seed and epoch, or None where nothing is drawn.
Key = tuple[list[int], tuple[int, int] | None]
Batches = Iterator[tuple[Tensor, Tensor]]


class WorkersData(Data):
    """Batches whose images processes open, augment and normalise, one by one.

    Augmented images are crops out of the image padded by 4 black pixels ("cifar10") or crops of
    random size and shape, resized ("imagenet"), and mirrored at random. Only one pass over the
    training batches, and one over the test batches, runs at a time: the next one ends it.
    """

    def _prepare(self, images: ImageSet) -> None:
        from torchvision.transforms import v2

        size, cuda = self.image_size, self.device.type == "cuda"
        plain = []  # images in memory have the size wanted already
        if isinstance(images.train, ImageFiles):
            plain = [v2.Resize(shorter_edge(size)), v2.CenterCrop(size)]
        augment = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()]
        if self.kind == "cifar10":
            augment[0] = v2.RandomCrop(size, padding=4)
        last = v2.PILToTensor(), functools.partial(normalised, scale=self._scale, shift=self._shift)
        train = Samples(images.train, *(augment if self._augments else plain), *last)
        self._train = loader_of(train, self.config.workers, pin_memory=cuda)
        test = Samples(images.test, *plain, *last)
        self._test = loader_of(test, self.config.workers, pin_memory=cuda)
        # Copies have a stream of their own, so that they run beside the arithmetic.
        self._copies = torch.cuda.Stream(self.device) if cuda else None

    def train_batches(self, epoch: int, start: int = 0) -> Batches:
        draws = (self.seed, epoch) if self._augments else None
        order = self._epoch_order(epoch)[start:].tolist()
        return self._on_device(batches_of(self._train, order, draws))

    def test_batches(self) -> Batches:
        order = BatchSampler(self._test_share, self.config.batch_size, drop_last=False)
        return self._on_device(batches_of(self._test, order))

    def close(self) -> None:
        self._train._iterator = self._test._iterator = None  # the processes end with it

    def _on_device(self, batches: Batches) -> Batches:
        for images, labels in batches:
            if self._copies is None:
                yield images.contiguous(memory_format=self._memory_format), labels
                continue
            with torch.cuda.stream(self._copies):
                images = images.to(self.device, non_blocking=True)
                images = images.contiguous(memory_format=self._memory_format)
                labels = labels.to(self.device, non_blocking=True)
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._copies)
            for tensor in (images, labels):
                tensor.record_stream(current)
            yield images, labels


def shorter_edge(image_size: int) -> int:
    """What a file's shorter edge is brought to before the middle is cut out: 256 for 224."""
    return round(image_size * 256 / 224)


class Samples(Dataset[tuple[Tensor, Tensor] | DataError]):
    """By key: the images, transformed one by one and stacked, and their labels, int64 [n].

    What is drawn for an image depends on (seed, epoch, its number) alone, whichever process draws.
    """

    def __init__(self, split: Pixels | ImageFiles, *transforms: Callable[[Any], Any]) -> None:
        from torchvision.transforms import v2

        self._split, self._transform = split, v2.Compose(transforms)

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor] | DataError:
        numbers, draws = key
        images = []
        try:
            with torch.random.fork_rng(devices=[]):
                for number in numbers:
                    if draws is not None:
                        # Not torch.manual_seed, which would seed the GPUs too.
                        torch.default_generator.manual_seed(seed_of("sample", *draws, number))
                    images.append(self._transform(self._split[number]))
        except DataError as error:
            return error  # raised here, it would arrive with a traceback in its message
        return default_collate(images), self._split.labels[numbers]


def loader_of(samples: Samples, workers: int, **options: Any) -> DataLoader[Any]:
    """A loader for :func:`batches_of`; its processes live on from one pass to the next."""
    return DataLoader(
        samples,
        sampler=[],  # the keys of the present pass
        batch_size=None,  # a key is a batch
        num_workers=workers,
        persistent_workers=workers > 0,
        worker_init_fn=_ignore_interrupts,
        generator=generator("loader"),  # else it draws a seed from torch's global one
        **options,
    )


def batches_of(
    loader: DataLoader[Any], order: Iterable[list[int]], draws: tuple[int, int] | None = None
) -> Batches:
    """A batch for each list of numbers in `order`. Raises DataError of an image."""
    loader.sampler[:] = ((numbers, draws) for numbers in order)
    for batch in loader:
        if isinstance(batch, DataError):
            loader._iterator = None  # ends the processes now, not whenever garbage is collected
            raise batch
        yield batch


def _ignore_interrupts(worker: int) -> None:
    # Ctrl-C reaches every process of the terminal; what it means is for the main one to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
