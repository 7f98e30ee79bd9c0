"""Bytes to the numbers a network takes, the same bits image by image and in batches."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ampfuse.experiments.data.request import DataError, DataRequest
from ampfuse.experiments.data.sets import ImageSet


@dataclasses.dataclass(frozen=True)
class Normalisation:
    """``(pixels / 255 - mean) / std`` as one product and one sum: float32 [channels, 1, 1] each."""

    scale: Tensor
    shift: Tensor

    @classmethod
    def of(cls, request: DataRequest, images: ImageSet) -> Normalisation:
        """The request's mean and std, or else the set's.

        Raises:
            DataError: neither one value nor one per channel, or a std that is not positive.
        """
        mean = _per_channel("mean", request.mean or images.mean, images.channels)
        std = _per_channel("std", request.std or images.std, images.channels)
        if not (std > 0).all():
            raise DataError(f"std {_listed(request.std or images.std)}: has to be positive")
        # In double precision, rounded once.
        scale, shift = 1 / (255 * std), -mean / std
        return cls(scale.float().view(-1, 1, 1), shift.float().view(-1, 1, 1))

    def to(self, device: torch.device) -> Normalisation:
        return Normalisation(self.scale.to(device), self.shift.to(device))

    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 [..., channels, h, w] to float32 of the same shape and memory format."""
        return pixels.float().mul_(self.scale).add_(self.shift)


def _per_channel(name: str, values: tuple[float, ...], channels: int) -> Tensor:
    given = torch.tensor(values, dtype=torch.float64)
    if len(values) == 1:
        return given.expand(channels)
    if channels == 1:
        return given.mean(0, keepdim=True)
    if len(values) != channels:
        raise DataError(f"{name} {_listed(values)}: give one value, or {channels}, one per channel")
    return given


def _listed(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)
