"""The shapes of the parameters of known networks, in the order of the models' own parameters."""

from __future__ import annotations

Shape = tuple[int, ...]


def _linear(inputs: int, outputs: int) -> list[Shape]:
    return [(outputs, inputs), (outputs,)]


def resnet50() -> list[Shape]:
    """ResNet-50 for ImageNet (He et al., arXiv:1512.03385), as in torchvision: 25,557,032."""

    def conv_bn(inputs: int, outputs: int, kernel: int) -> list[Shape]:
        return [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]

    shapes = conv_bn(3, 64, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += conv_bn(inputs, width, 1) + conv_bn(width, width, 3)
            shapes += conv_bn(width, 4 * width, 1)
            if block == 0:  # the shortcut
                shapes += conv_bn(inputs, 4 * width, 1)
            inputs = 4 * width
    return shapes + _linear(inputs, 1000)


def vit_b() -> list[Shape]:
    """ViT-B/16 for ImageNet (Dosovitskiy et al., arXiv:2010.11929), torchvision's: 86,567,656."""
    width, norm = 768, [(768,), (768,)]
    shapes: list[Shape] = [(1, 1, width), (width, 3, 16, 16), (width,), (1, 1 + 14 * 14, width)]
    for _ in range(12):
        shapes += norm + _linear(width, 3 * width) + _linear(width, width)
        shapes += norm + _linear(width, 4 * width) + _linear(4 * width, width)
    return shapes + norm + _linear(width, 1000)


def gpt2_medium() -> list[Shape]:
    """GPT-2 medium (Radford et al., 2019), its head tied to the embedding: 354,823,168.

    Its linear layers are stored as (inputs, outputs).
    """
    width, norm = 1024, [(1024,), (1024,)]

    def linear(inputs: int, outputs: int) -> list[Shape]:
        return [(inputs, outputs), (outputs,)]

    shapes: list[Shape] = [(50257, width), (1024, width)]
    for _ in range(24):
        shapes += norm + linear(width, 3 * width) + linear(width, width)
        shapes += norm + linear(width, 4 * width) + linear(4 * width, width)
    return shapes + norm
