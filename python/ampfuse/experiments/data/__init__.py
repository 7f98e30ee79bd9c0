"""Data of the experiments: MNIST, CIFAR-10 and ImageNet from files, digits and synthetic images.

:func:`open_data` reads a run's settings and returns :class:`Data`: training and test batches on the
device, normalised. One of two loaders makes them: worker processes, image by image
(:mod:`workers`), or the device itself, which holds the whole set as uint8 (:mod:`resident`).
"""

from ampfuse.experiments.data.loader import Data
from ampfuse.experiments.data.opening import open_data, read_files
from ampfuse.experiments.data.request import DataError

__all__ = ["Data", "DataError", "open_data", "read_files"]
