"""Made-up images in the shape of a data set: noise over a pattern that tells the class.

A network can learn the patterns, so that a loss that stays where it was means that something is
broken.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ampfuse.experiments.data.order import generator
from ampfuse.experiments.data.request import KINDS, DataRequest
from ampfuse.experiments.data.sets import ImageSet, Pixels

# Evaluation is for show here: no more batches than these.
TEST_BATCHES = 4
_PATTERN = 4  # fields along an edge


def load(request: DataRequest) -> ImageSet:
    """Images of the kind's channels and classes, from the seed alone and alike on every machine.

    Training images are `synthetic_size`, or a batch per process if that is more; test images a
    quarter of them, or four batches per process if that is less.
    """
    kind = KINDS[request.kind]
    classes = request.classes or kind.classes
    world = request.world_size
    train_size = max(request.synthetic_size, request.batch_size * world)
    test_size = min(-(-train_size // 4), TEST_BATCHES * request.test_batch_size * world)
    random = generator("synthetic", request.seed)
    patterns = torch.randint(
        128, (classes, kind.channels, _PATTERN, _PATTERN), dtype=torch.uint8, generator=random
    )

    def images(count: int) -> Pixels:
        size = request.image_size
        labels = torch.randint(classes, (count,), generator=random)
        # Noise and pattern are below 128 each: their sum is a byte.
        pixels = torch.randint(
            128, (count, kind.channels, size, size), dtype=torch.uint8, generator=random
        )
        for part, of in zip(pixels.split(256), labels.split(256), strict=True):
            part += functional.interpolate(patterns[of], (size, size), mode="nearest")
        return Pixels(pixels, labels)

    return ImageSet(
        train=images(train_size),
        test=images(test_size),
        classes=classes,
        channels=kind.channels,
        mean=(0.5,) * kind.channels,
        std=(0.2,) * kind.channels,
    )
