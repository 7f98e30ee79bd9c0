"""Data of the experiments: MNIST, CIFAR-10 and ImageNet from files, digits and synthetic images.

:func:`open_data` reads a run's settings and returns :class:`Data`: training and test batches on the
device, normalised. One of two loaders makes them: worker processes, image by image
(:mod:`workers`), or the device itself, which holds the whole set as uint8 (:mod:`resident`).
"""

import torch

from ampfuse.experiments.config import RunConfig
from ampfuse.experiments.data import made
from ampfuse.experiments.data.files import read_files
from ampfuse.experiments.data.loader import Data
from ampfuse.experiments.data.resident import ResidentData
from ampfuse.experiments.data.sets import KIND_OF, DataError
from ampfuse.experiments.data.workers import WorkersData

__all__ = ["Data", "DataError", "open_data", "read_files"]


def open_data(
    config: RunConfig, device: torch.device, *, rank: int = 0, world_size: int = 1
) -> Data:
    """The data of `config` on `device`, for process `rank` of `world_size`."""
    kind = KIND_OF[config.experiment]
    if config.data == "digits":
        images = made.digits(config.image_size)
    elif config.data == "synthetic":
        images = made.synthetic(kind, config, world_size)
    else:
        images = read_files(kind, config.data, config.image_size)
    loader = WorkersData if config.loader == "workers" else ResidentData
    return loader(config, kind, images, device, rank, world_size)
