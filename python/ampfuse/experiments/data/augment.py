"""Random crops and flips of a whole batch at once, on its device."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ampfuse.experiments.data import order


@dataclasses.dataclass(frozen=True)
class Crops:
    """Where the crop of each image starts and whether it is mirrored: int64, int64, bool.

    All of one shape: [n], or [batches, n] for an epoch.
    """

    top: Tensor
    left: Tensor
    flip: Tensor

    @classmethod
    def draw(cls, shape: tuple[int, ...], room: int, *what: object) -> Crops:
        """For images `room` pixels larger than the crop; from `what` alone."""
        random = order.generator("crops", *what)
        top, left = torch.randint(room + 1, (2, *shape), generator=random)
        return cls(top, left, torch.randint(2, shape, generator=random).bool())

    def to(self, device: torch.device) -> Crops:
        return Crops(*(order.upload(part, device) for part in (self.top, self.left, self.flip)))

    def __getitem__(self, batch: int) -> Crops:
        return Crops(self.top[batch], self.left[batch], self.flip[batch])

    def apply(self, images: Tensor, chosen: Tensor, size: int) -> Tensor:
        """Crop the images numbered `chosen`, int64 [n]: uint8 [all, h, w, c] to [n, size, size, c].

        One gather out of the whole set: no padded or larger copy of the batch stands in between.
        """
        _, height, width, channels = images.shape
        steps = torch.arange(size, device=images.device)
        columns = torch.where(self.flip[:, None], size - 1 - steps, steps) + self.left[:, None]
        rows = (chosen * height + self.top)[:, None] + steps
        pixels = rows[:, :, None] * width + columns[:, None, :]
        # On the CPU several times faster than indexing by images, rows and columns.
        crops = images.view(-1, channels).index_select(0, pixels.view(-1))
        return crops.view(-1, size, size, channels)


def centre(images: Tensor, size: int) -> Tensor:
    """The middle `size` by `size` pixels, as a view: [n, h, w, c] to [n, size, size, c]."""
    top, left = ((edge - size) // 2 for edge in images.shape[1:3])
    return images[:, top : top + size, left : left + size]
