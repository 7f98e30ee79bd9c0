"""Networks for images, FP32 on the CPU, from random weights of torch's global generator."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn


def build(name: str, classes: int, channels: int = 3, dropout: float = 0.0) -> nn.Module:
    """``vgg16`` and ``wrn<depth>_<width>`` for small images; else torchvision's or timm's."""
    if name == "vgg16":
        from torchvision.models import vgg

        features = vgg.make_layers(vgg.cfgs["D"], batch_norm=True)
        return nn.Sequential(
            features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)
        )
    if wide := re.fullmatch(r"wrn(\d+)_(\d+)", name):
        return WideResNet(int(wide[1]), int(wide[2]), classes, channels, dropout)
    import torchvision

    if hasattr(torchvision.models, name):
        return getattr(torchvision.models, name)(num_classes=classes)
    import timm

    return timm.create_model(name, num_classes=classes)


class WideResNet(nn.Module):
    """Wide residual network (Zagoruyko and Komodakis, 2016): three stages of pre-activation blocks
    with 16, 32 and 64 times `width` channels; the second and third halve the image."""

    def __init__(
        self, depth: int, width: int, classes: int, channels: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 16, kernel_size=3, padding=1, bias=False)
        self.stages = nn.Sequential()
        inputs = 16
        for stage in range(3):
            outputs = 16 * width * 2**stage
            for block in range((depth - 4) // 6):
                stride = 2 if stage > 0 and block == 0 else 1
                self.stages.append(_WideBlock(inputs, outputs, stride, dropout))
                inputs = outputs
        self.norm = nn.BatchNorm2d(inputs)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.relu(self.norm(self.stages(self.stem(images))))
        return self.head(torch.flatten(self.pool(hidden), 1))


class _WideBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = (
            None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
        )

    def forward(self, images: Tensor) -> Tensor:
        active = self.relu(self.norm1(images))
        hidden = self.relu(self.norm2(self.conv1(active)))
        hidden = self.conv2(self.dropout(hidden))
        # Where the shape changes, both ways start from the activated input.
        return hidden + (images if self.shortcut is None else self.shortcut(active))
