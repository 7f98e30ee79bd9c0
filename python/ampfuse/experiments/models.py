"""The networks of the experiments by name, for any number of classes and channels.

Weights are random, drawn from torch's global generator. This file needs torch alone: the benchmarks
load it in processes without ampfuse.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

NAMES = "vgg16 wrn28_10 seresnext50_32x4d densenet161 resnet18 resnet50 mnist_cnn mlp".split()
_SMALLEST = {"vgg16": 32, "densenet161": 29, "mnist_cnn": 6}  # images, in pixels; others take any


def build(
    name: str, *, classes: int, channels: int, image_size: int, dropout: float = 0.0
) -> nn.Module:
    """The network `name`: one of :data:`NAMES`, ``wrn<depth>_<width>`` or the demo's
    ``digits<width>``. In FP32 on the CPU, it takes images [n, channels, image_size, image_size] to
    scores of `classes`, ``mlp`` to as many values. `dropout` is for Wide-ResNets.

    Raises:
        ValueError: there is no such network, or the images are too small for it.
    """
    if wide := re.fullmatch(r"wrn(\d+)_(\d+)", name):
        return wide_resnet(int(wide[1]), int(wide[2]), classes, channels, dropout)
    if digits := re.fullmatch(r"digits(\d+)", name):
        return digits_net(int(digits[1]), classes, channels)
    if name not in NAMES:
        raise ValueError(f"unknown model {name!r}: the models are {', '.join(NAMES)}, wrn16_4, ...")
    if image_size < (smallest := _SMALLEST.get(name, 1)):
        raise ValueError(f"it needs images of {smallest} pixels or more, not {image_size}")
    if name == "mnist_cnn":
        return mnist_cnn(classes, channels, image_size)
    if name == "mlp":
        return mlp(channels * image_size**2)
    if name == "vgg16":
        return vgg16(classes, channels)
    if name == "seresnext50_32x4d":
        import timm

        return timm.create_model(name, num_classes=classes, in_chans=channels)
    import torchvision

    model = getattr(torchvision.models, name)(num_classes=classes)
    _take_channels(model.features.conv0 if name == "densenet161" else model.conv1, channels)
    return model


def _take_channels(conv: nn.Conv2d, channels: int) -> None:
    if channels != conv.in_channels:
        conv.in_channels = channels
        shape = (conv.out_channels, channels, *conv.kernel_size)
        conv.weight = nn.Parameter(torch.empty(shape))
        conv.reset_parameters()  # draws the same random numbers as a new convolution
        _initialise(conv)


def _initialise(module: nn.Module) -> None:
    """Initialise convolutions as He et al. (2015) and torchvision do."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def vgg16(classes: int, channels: int) -> nn.Sequential:
    """VGG16 for small images: the convolutions with BatchNorm, then a single linear layer."""
    from torchvision.models import vgg

    # vgg16_bn() would build a large head, nine tenths of its weights, for nothing.
    features = vgg.make_layers(vgg.cfgs["D"], batch_norm=True)
    _take_channels(features[0], channels)
    features.apply(_initialise)
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def wide_resnet(
    depth: int, width: int, classes: int, channels: int, dropout: float = 0.0
) -> nn.Sequential:
    """Wide residual network (Zagoruyko and Komodakis, 2016): three stages of pre-activation blocks
    with 16, 32 and 64 times `width` channels; the second and third halve the image."""
    if depth < 10 or depth % 6 != 4 or width < 1:
        raise ValueError(
            f"wrn{depth}_{width}: the depth must be 6n + 4 (10, 16, 22, ...), the width at least 1"
        )
    stem = nn.Conv2d(channels, 16, kernel_size=3, padding=1, bias=False)
    stages, inputs = nn.Sequential(), 16
    for stage in range(3):
        outputs = 16 * width * 2**stage
        for block in range((depth - 4) // 6):
            stride = 2 if stage > 0 and block == 0 else 1
            stages.append(_WideBlock(inputs, outputs, stride, dropout))
            inputs = outputs
    norm, head = nn.BatchNorm2d(inputs), nn.Linear(inputs, classes)
    relu, pool = nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)
    model = nn.Sequential(stem, stages, norm, relu, pool, nn.Flatten(), head)
    model.apply(_initialise)
    nn.init.zeros_(head.bias)
    return model


class _WideBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        active = self.relu(self.norm1(images))
        hidden = self.relu(self.norm2(self.conv1(active)))
        hidden = self.conv2(self.dropout(hidden))
        # If the shape changes, both branches start from the activated input.
        return hidden + (images if self.shortcut is None else self.shortcut(active))


def mnist_cnn(classes: int, channels: int, image_size: int) -> nn.Sequential:
    """The small network of PyTorch's MNIST example, ending in scores."""
    return nn.Sequential(
        nn.Conv2d(channels, 32, kernel_size=3),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, kernel_size=3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * ((image_size - 4) // 2) ** 2, 128),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Linear(128, classes),
    )


def mlp(width: int) -> nn.Sequential:
    """Three linear layers of `width` by `width` with ReLU between; images are flattened first."""
    first, second, third = (nn.Linear(width, width) for _ in range(3))
    relu, another = nn.ReLU(inplace=True), nn.ReLU(inplace=True)
    return nn.Sequential(nn.Flatten(), first, relu, second, another, third)


def digits_net(width: int, classes: int, channels: int) -> nn.Sequential:
    """The network of the demo: `width` channels at 8x8 pixels, then twice as many at 4x4."""
    blocks, inputs = [], channels
    for outputs, stride in ((width, 1), (width, 1), (2 * width, 2), (2 * width, 1)):
        # No bias: the batch norm would remove it.
        conv = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        blocks.append(nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)))
        inputs = outputs
    head = nn.Linear(inputs, classes)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
