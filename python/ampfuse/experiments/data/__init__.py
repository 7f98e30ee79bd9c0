"""Data of the experiments: MNIST, CIFAR-10 and ImageNet from files, digits and synthetic images.

:func:`open_data` reads a run's settings and returns :class:`Data`: training and test batches on the
device, normalised. One of two loaders makes them (:mod:`loaders`): worker processes, image by
image, or the device itself, which holds the whole set as uint8.
"""

import torch

from ampfuse.experiments.data.loaders import Data, NormalFeatures, ResidentData, WorkersData
from ampfuse.experiments.data.sets import DataError, digits, read_files, synthetic
from ampfuse.experiments.settings import Settings

__all__ = ["Data", "DataError", "open_data", "read_files"]

# Which set a script's folder of --data has to hold, and what its synthetic images look like.
_KIND_OF = {"cifar": "cifar10", "imagenet": "imagenet", "mnist": "mnist", "mlp": "mnist"}


def open_data(settings: Settings, device: torch.device, rank: int = 0, world_size: int = 1) -> Data:
    """The data of `settings` on `device`, for process `rank` of `world_size`."""
    if (settings.experiment, settings.data) == ("mlp", "synthetic"):
        return NormalFeatures(settings, device)
    kind = _KIND_OF.get(settings.experiment, "mnist")
    if settings.data == "digits":
        images = digits(settings.image_size)
    elif settings.data == "synthetic":
        images = synthetic(kind, settings, world_size)
    else:
        images = read_files(kind, settings.data, settings.image_size)
    loader = WorkersData if settings.loader == "workers" else ResidentData
    return loader(settings, kind, images, device, rank, world_size)
