"""The demo's network: four convolutions with batch norm, and nothing that knows of precision."""

from __future__ import annotations

from torch import nn


class DigitsNet(nn.Sequential):
    """Images [n, 1, 8, 8] to scores [n, 10]; `width` channels at 8x8, then twice as many at 4x4."""

    def __init__(self, width: int) -> None:
        super().__init__(
            _conv(1, width),
            _conv(width, width),
            _conv(width, 2 * width, stride=2),
            _conv(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, 10),
        )


def _conv(channels: int, filters: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        # No bias: the batch norm after it would take it away again.
        nn.Conv2d(channels, filters, kernel_size=3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(filters),
        nn.ReLU(inplace=True),
    )
