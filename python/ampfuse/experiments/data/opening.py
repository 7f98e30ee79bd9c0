"""From a run's settings to batches: find the set, then the loader."""

from __future__ import annotations

from pathlib import Path

import torch

from ampfuse.experiments import tasks
from ampfuse.experiments.config import RunConfig
from ampfuse.experiments.data import cifar, digits, download, folders, idx, synthetic
from ampfuse.experiments.data.loader import Data
from ampfuse.experiments.data.request import KINDS, DataError, DataRequest, one_line
from ampfuse.experiments.data.resident import ResidentData
from ampfuse.experiments.data.sets import ImageSet
from ampfuse.experiments.data.workers import WorkersData


def open_data(
    config: RunConfig, device: torch.device, *, rank: int = 0, world_size: int = 1
) -> Data:
    """Training and test batches of `config` on `device`, for process `rank` of `world_size`.

    MNIST and CIFAR-10 are downloaded if their folder holds none of them.

    Raises:
        DataError: nothing to read and no way to download it, damaged files, fewer images than a
            batch, or more than fit on the device.
    """
    request = DataRequest(
        kind=tasks.TASKS[config.experiment].kind,
        source=config.data,
        device=device,
        batch_size=config.batch_size,
        image_size=config.image_size,
        loader=config.loader,
        workers=config.workers,
        augment=config.augment,
        mean=config.mean,
        std=config.std,
        shuffle=config.shuffle,
        channels_last=config.channels_last,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
        synthetic_size=config.synthetic_size,
    )
    images = _read(request)
    return (WorkersData if request.loader == "workers" else ResidentData)(request, images)


def _read(request: DataRequest) -> ImageSet:
    if request.source == "digits":
        return digits.load(request.image_size)
    if request.source == "synthetic":
        return synthetic.load(request)
    return read_files(request.kind, request.source, request.image_size)


def read_files(kind: str, folder: str, image_size: int) -> ImageSet:
    """The published data set `kind` ("mnist", "cifar10" or "imagenet") out of `folder`.

    MNIST and CIFAR-10 are downloaded into a folder that holds none of them, and resized to
    `image_size`.

    Raises:
        DataError: it is not there, damaged, or could not be downloaded.
    """
    return _from_folder(kind, Path(folder).expanduser(), image_size)


def _from_folder(kind: str, folder: Path, image_size: int) -> ImageSet:
    load, expected = {
        "mnist": (lambda: idx.load(folder, image_size), idx.EXPECTED),
        "cifar10": (lambda: cifar.load(folder, image_size), cifar.EXPECTED),
        "imagenet": (lambda: folders.load(folder), folders.EXPECTED),
    }[kind]
    title = KINDS[kind].title
    try:
        images = load()
    except OSError as error:
        raise DataError(f"--data {folder}: not readable ({one_line(error)})") from error
    if images is not None:
        return images
    if folder.exists() and not folder.is_dir():
        raise DataError(f"--data {folder}: no folder; expected one that holds {expected}")
    if kind in download.KINDS:
        return download.fetch(kind, folder, load, expected)
    raise DataError(
        f"--data {folder}: holds no {title}; expected: {expected}; or give --data "
        "digits or synthetic"
    )
