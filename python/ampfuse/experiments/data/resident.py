"""The loader that has nothing to load: the whole set lies on the device as bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import BatchSampler

from ampfuse.experiments.data.loader import Data, generator, normalised
from ampfuse.experiments.data.sets import ImageFiles, ImageSet, Pixels
from ampfuse.experiments.data.workers import Samples, batches_of, loader_of, shorter_edge

_PADDING = 4  # black pixels around images that have no margin to crop from
_AT_ONCE = 32  # files decoded in one piece


class ResidentData(Data):
    """A batch is a gather and a normalisation on the device, for all its images at once.

    Order and crops are drawn on the CPU, so that they are the same on every device, and sent once
    per epoch; no batch makes the host wait. Augmented images are crops at random places of the
    stored ones, which are larger by 8/7 (image files) or padded by 4 black pixels, and every other
    one is mirrored.
    """

    def _prepare(self, images: ImageSet) -> None:
        from_files = isinstance(images.train, ImageFiles)
        self._stored_size = shorter_edge(self.image_size) if from_files else self.image_size
        everything = range(self.train_size)
        self._train, self._train_labels = self._on_device(images.train, everything, "train")
        self._test, self._test_labels = self._on_device(images.test, self._test_share, "test")
        if self._augments and not from_files:
            self._train = functional.pad(self._train, (0, 0, *(_PADDING,) * 4))
        stored = (self._train, self._train_labels, self._test, self._test_labels)
        self.device_bytes = sum(tensor.nbytes for tensor in stored)
        self._scale, self._shift = self._scale.to(self.device), self._shift.to(self.device)

    def _on_device(
        self, split: Pixels | ImageFiles, which: range, title: str
    ) -> tuple[Tensor, Tensor]:
        """uint8 [len(which), h, w, channels], so that a crop moves whole pixels, and the labels."""
        labels = split.labels[which.start : which.stop].to(self.device)
        if isinstance(split, Pixels):
            images = split.images[which.start : which.stop].permute(0, 2, 3, 1)
            return images.contiguous().to(self.device), labels
        from torchvision.transforms import v2
        from tqdm import tqdm

        edge = self._stored_size
        result = torch.empty(len(which), edge, edge, 3, dtype=torch.uint8, device=self.device)
        middle = v2.Resize(edge), v2.CenterCrop(edge), v2.PILToTensor()
        loader = loader_of(Samples(split, *middle), self.config.workers)
        batches = batches_of(loader, BatchSampler(which, _AT_ONCE, drop_last=False))
        # None: a bar on a terminal, nothing in a log.
        hidden = True if self.rank else None
        batches = tqdm(batches, f"decoding {title}", -(-len(which) // _AT_ONCE), disable=hidden)
        for into, (pixels, _) in zip(result.split(_AT_ONCE), batches, strict=True):
            into.copy_(pixels.permute(0, 2, 3, 1))
        return result, labels

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        order, size = self._epoch_order(epoch), self.image_size
        drawn = [order]
        if self._augments:
            room = self._train.shape[1] - size
            random = generator("crops", self.seed, epoch, self.rank)
            top, left = torch.randint(room + 1, (2, *order.shape), generator=random)
            flip = torch.randint(2, order.shape, generator=random).bool()
            drawn += [top, left, flip]
        for chosen, *crop in zip(*(self._upload(part)[start:] for part in drawn), strict=True):
            if crop:
                pixels = cropped(self._train, size, chosen, *crop)
            else:
                pixels = _centre(self._train, size).index_select(0, chosen)
            yield self._finish(pixels), self._train_labels.index_select(0, chosen)

    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        images = _centre(self._test, self.image_size)
        parts = (tensor.split(self.config.batch_size) for tensor in (images, self._test_labels))
        for pixels, labels in zip(*parts, strict=True):
            yield self._finish(pixels), labels

    def _upload(self, values: Tensor) -> Tensor:
        """`values` on the device, without waiting for what that is doing."""
        if self.device.type == "cuda":
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)

    def _finish(self, pixels: Tensor) -> Tensor:
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


def _centre(images: Tensor, size: int) -> Tensor:
    """The middle `size` by `size` pixels, as a view: [n, h, w, c] to [n, size, size, c]."""
    top, left = ((edge - size) // 2 for edge in images.shape[1:3])
    return images[:, top : top + size, left : left + size]
