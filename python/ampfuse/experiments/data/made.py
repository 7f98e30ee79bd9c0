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
    """The demo's split of the digits: 1437 grey images to train and 360 to test, enlarged."""
    pixels, labels, train, test = read_digits()
    everything = Pixels((pixels * (255 / 16)).round().byte(), labels).resized(image_size)
    images = everything.images
    std, mean = torch.std_mean(images[train].double() / 255, correction=0)
    facts = Facts("digits", 1, 10, (mean.item(),), (std.item(),))
    return ImageSet(*(Pixels(images[part], labels[part]) for part in (train, test)), facts)


def synthetic(kind: str, config: RunConfig, world_size: int) -> ImageSet:
    """Images in the shape of `kind`, of the seed alone: noise over a pattern that tells the class.

    Training images are `synthetic_size`, or a batch per process if that is more; test images a
    quarter of them, or four batches per process if that is less.
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
