"""The loader that has nothing to load: the whole set lies on the device as bytes.

A batch is a gather and a normalisation there, for all its images at once. Order and crops are drawn
on the CPU, so that they are the same on every device, and sent once per epoch; no batch makes the
host wait.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.nn import functional

from ampfuse.experiments.data.augment import Crops, centre
from ampfuse.experiments.data.decode import decode
from ampfuse.experiments.data.loader import Data
from ampfuse.experiments.data.memory import check_room
from ampfuse.experiments.data.order import upload
from ampfuse.experiments.data.request import DataRequest
from ampfuse.experiments.data.sets import ImageFiles, ImageSet, Pixels
from ampfuse.experiments.data.transforms import stored_size

_PADDING = 4  # black pixels around images that have no margin to crop from


class ResidentData(Data):
    """See :mod:`ampfuse.experiments.data.resident`.

    Raises:
        DataError: the set does not fit into the device's free memory.
    """

    def __init__(self, request: DataRequest, images: ImageSet) -> None:
        super().__init__(request, images)
        self._normalise = self._normalise.to(request.device)
        mine = self._test_share
        wanted = {"train": (images.train, range(self.train_size)), "test": (images.test, mine)}
        size = sum(_bytes(split, len(which), request) for split, which in wanted.values())
        check_room(size, request.device, request.source)
        self._augment = request.augment and request.kind != "mnist"
        train, self._test_images = (
            _on_device(split, which, request, title) for title, (split, which) in wanted.items()
        )
        if self._augment and train.shape[1] == self.image_size:
            train = functional.pad(train, (0, 0, *(_PADDING,) * 4))
        self._train_images = train
        self._train_labels = images.train.labels.to(request.device)
        self._test_labels = images.test.labels[mine.start : mine.stop].to(request.device)

    @property
    def device_bytes(self) -> int:
        return sum(
            tensor.nbytes
            for tensor in (
                self._train_images,
                self._train_labels,
                self._test_images,
                self._test_labels,
            )
        )

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        request, size, images = self.request, self.image_size, self._train_images
        device = request.device
        order = self._epoch_order(epoch)
        crops = None
        if self._augment:
            room = images.shape[1] - size
            crops = Crops.draw(tuple(order.shape), room, request.seed, epoch, request.rank)
            crops = crops.to(device)
        order = upload(order, device)
        for number in range(start, len(order)):
            chosen = order[number]
            if crops is not None:
                pixels = crops[number].apply(images, chosen, size)
            else:
                pixels = centre(images, size).index_select(0, chosen)
            yield self._finish(pixels), self._train_labels.index_select(0, chosen)

    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        size = self.request.test_batch_size
        images = centre(self._test_images, self.image_size).split(size)
        for pixels, labels in zip(images, self._test_labels.split(size), strict=True):
            yield self._finish(pixels), labels

    def _finish(self, pixels: Tensor) -> Tensor:
        """uint8 [n, h, w, c] to what the network takes."""
        pixels = pixels.permute(0, 3, 1, 2).contiguous(memory_format=self._memory_format)
        return self._normalise(pixels)


def _on_device(
    split: Pixels | ImageFiles, which: range, request: DataRequest, title: str
) -> Tensor:
    """uint8 [len(which), h, w, c]: pixel by pixel, so that a crop moves whole pixels."""
    if isinstance(split, ImageFiles):
        return decode(split, which, request, title)
    images = split.images[which.start : which.stop].permute(0, 2, 3, 1)
    return images.contiguous().to(request.device)


def _bytes(split: Pixels | ImageFiles, count: int, request: DataRequest) -> int:
    """What `count` images will take on the device."""
    if isinstance(split, ImageFiles):
        return count * 3 * stored_size(request.image_size) ** 2
    return count * split.images[0].nbytes
