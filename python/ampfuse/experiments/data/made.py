"""Sets that need no files: scikit-learn's digits, enlarged, and synthetic images."""

from __future__ import annotations

import torch
from torch.nn import functional

from ampfuse.demo.data import read_digits
from ampfuse.experiments.config import RunConfig
from ampfuse.experiments.data.loader import generator
from ampfuse.experiments.data.sets import PUBLISHED, Facts, ImageSet, Pixels

_TEST_BATCHES = 4  # of synthetic images: their evaluation is for show
_PATTERN = 4  # fields along an edge


def digits(image_size: int) -> ImageSet:
    """The demo's split of the digits: 1437 grey images to train and 360 to test, enlarged.

    They stand in for any of the data sets where there is none.
    """
    pixels, labels, train, test = read_digits()
    everything = Pixels((pixels * (255 / 16)).round().byte(), labels).resized(image_size)
    images = everything.images
    counts = torch.bincount(images[train].flatten(), minlength=256).double()
    shares = torch.arange(256, dtype=torch.float64) / 255
    mean = (counts * shares).sum() / counts.sum()
    variance = (counts * (shares - mean) ** 2).sum() / counts.sum()
    return ImageSet(
        Pixels(images[train], labels[train]),
        Pixels(images[test], labels[test]),
        Facts("digits", 1, 10, (mean.item(),), (variance.sqrt().item(),)),
    )


def synthetic(kind: str, config: RunConfig, world_size: int) -> ImageSet:
    """Images in the shape of `kind`: noise over a pattern that tells the class.

    A network can learn the patterns, so that a loss that stays where it was means that something is
    broken. They come from the seed alone and are alike on every machine: training images are
    `synthetic_size`, or a batch per process if that is more; test images a quarter of them, or four
    batches per process if that is less.
    """
    facts, size = PUBLISHED[kind], config.image_size
    channels, together = facts.channels, config.batch_size * world_size
    train_size = max(config.synthetic_size, together)
    test_size = min(-(-train_size // 4), _TEST_BATCHES * together)
    random = generator("synthetic", config.seed)
    patterns = torch.randint(
        128, (facts.classes, channels, _PATTERN, _PATTERN), dtype=torch.uint8, generator=random
    )

    def draw(count: int) -> Pixels:
        labels = torch.randint(facts.classes, (count,), generator=random)
        # Noise and pattern are below 128 each: their sum is a byte.
        pixels = torch.randint(
            128, (count, channels, size, size), dtype=torch.uint8, generator=random
        )
        for part, of in zip(pixels.split(256), labels.split(256), strict=True):
            part += functional.interpolate(patterns[of], (size, size), mode="nearest")
        return Pixels(pixels, labels)

    train, test = draw(train_size), draw(test_size)
    return ImageSet(train, test, facts._replace(mean=(0.5,) * channels, std=(0.2,) * channels))
