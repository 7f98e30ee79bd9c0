"""The usual loader: worker processes open, augment and normalise images one by one.

What an image becomes depends on (seed, epoch, its number) alone: the random numbers of its
augmentation start from those, whichever process draws them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ampfuse.experiments.data.loader import Data
from ampfuse.experiments.data.normalise import Normalisation
from ampfuse.experiments.data.order import drawing_for
from ampfuse.experiments.data.processes import Feed
from ampfuse.experiments.data.request import DataError, DataRequest
from ampfuse.experiments.data.sets import ImageFiles, ImageSet, Pixels
from ampfuse.experiments.data.transforms import augmentation, plain

_Key = tuple[int, int, int]  # seed, epoch, number of the image


class WorkersData(Data):
    """See :mod:`ampfuse.experiments.data.workers`.

    Its batches raise DataError for a file that cannot be read. Only one pass over the training
    batches, and one over the test batches, runs at a time: the next one ends it.
    """

    def __init__(self, request: DataRequest, images: ImageSet) -> None:
        super().__init__(request, images)
        cuda = request.device.type == "cuda"

        def feed(split: Pixels | ImageFiles, augment: bool) -> Feed[_Key]:
            samples = _Samples(split, request, self._normalise, augment)
            return Feed(samples, workers=request.workers, pinned=cuda)

        self._train, self._test = feed(images.train, True), feed(images.test, False)
        # Copies have a stream of their own, so that they run beside the arithmetic.
        self._copies = torch.cuda.Stream(request.device) if cuda else None

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        order, seed = self._epoch_order(epoch)[start:], self.request.seed
        keys = ([(seed, epoch, index) for index in batch.tolist()] for batch in order)
        return self._on_device(self._train.batches(keys))

    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        size, mine = self.request.test_batch_size, self._test_share
        starts = range(0, len(mine), size)
        keys = ([(0, 0, index) for index in mine[at : at + size]] for at in starts)
        return self._on_device(self._test.batches(keys))

    def close(self) -> None:
        self._train.close()
        self._test.close()

    def _on_device(self, batches: Iterator[list[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in batches:
            if self._copies is None:
                yield images.contiguous(memory_format=self._memory_format), labels
                continue
            with torch.cuda.stream(self._copies):
                images = images.to(self.request.device, non_blocking=True)
                images = images.contiguous(memory_format=self._memory_format)
                labels = labels.to(self.request.device, non_blocking=True)
            current = torch.cuda.current_stream(self.request.device)
            current.wait_stream(self._copies)
            for tensor in (images, labels):
                tensor.record_stream(current)
            yield images, labels


class _Samples(Dataset[tuple[Tensor, int] | DataError]):
    """By key: float32 [channels, size, size] and its label."""

    def __init__(
        self,
        split: Pixels | ImageFiles,
        request: DataRequest,
        normalise: Normalisation,
        augment: bool,
    ) -> None:
        self._split, self._normalise = split, normalise
        self._augment = augmentation(request) if augment else None
        # Images in memory have the size wanted already.
        self._plain = plain(request.image_size) if isinstance(split, ImageFiles) else None

    def __getitem__(self, key: _Key) -> tuple[Tensor, int] | DataError:
        seed, epoch, index = key
        try:
            image = self._split.open(index)
        except DataError as error:
            return error
        if self._augment is not None:
            with drawing_for("sample", seed, epoch, index):
                image = self._augment(image)
        elif self._plain is not None:
            image = self._plain(image)
        if not isinstance(image, Tensor):
            from torchvision.transforms import v2

            image = v2.functional.pil_to_tensor(image)
        return self._normalise(image), int(self._split.labels[index])
