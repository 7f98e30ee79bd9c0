"""scikit-learn's digits, enlarged: real images that come with a package, for when there is no data.

They stand in for any of the data sets: 1437 grey images to train and 360 to test, ten classes.
"""

from __future__ import annotations

from ampfuse.demo.data import read_digits
from ampfuse.experiments.data.sets import ImageSet, Pixels, resized


def load(image_size: int) -> ImageSet:
    """The demo's split of the digits, at `image_size` pixels."""
    pixels, labels, train, test = read_digits()
    images = resized(pixels * (255 / 16), image_size)
    shares = images[train].double() / 255
    return ImageSet(
        train=Pixels(images[train], labels[train]),
        test=Pixels(images[test], labels[test]),
        classes=10,
        channels=1,
        mean=(shares.mean().item(),),
        std=(shares.std().item(),),
    )
