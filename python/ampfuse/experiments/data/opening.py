"""From a request to batches: find the set, then the loader."""

from __future__ import annotations

from ampfuse.experiments.data import digits, synthetic
from ampfuse.experiments.data.loader import Data
from ampfuse.experiments.data.request import DataError, DataRequest
from ampfuse.experiments.data.resident import ResidentData
from ampfuse.experiments.data.sets import ImageSet
from ampfuse.experiments.data.workers import WorkersData


def open_data(request: DataRequest) -> Data:
    """The data of `request`; MNIST and CIFAR-10 are downloaded if their folder holds none of them.

    Raises:
        DataError: nothing to read and no way to download it, damaged files, fewer images than a
            batch, or more than fit on the device.
    """
    images = _read(request)
    return (WorkersData if request.loader == "workers" else ResidentData)(request, images)


def _read(request: DataRequest) -> ImageSet:
    if request.source == "digits":
        return digits.load(request.image_size)
    if request.source == "synthetic":
        return synthetic.load(request)
    raise DataError(f"--data {request.source}: digits or synthetic")
