"""What a trainer asks for, and what is known of the data sets it can ask for."""

from __future__ import annotations

import dataclasses

import torch

from ampfuse.experiments.config import UsageError


class DataError(UsageError):
    """Data that is missing, damaged or too much. The message is one line: what, and what to do."""


def one_line(error: Exception) -> str:
    """What `error` says, to be put into a DataError."""
    return " ".join(str(error).split()) or type(error).__name__


@dataclasses.dataclass(frozen=True)
class Kind:
    """A published data set. `mean` and `std` are those of its pixels, as shares of 255."""

    title: str
    channels: int
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


KINDS = {
    "mnist": Kind("MNIST", 1, 10, (0.1307,), (0.3081,)),
    "cifar10": Kind("CIFAR-10", 3, 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagenet": Kind("ImageNet", 3, 1000, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclasses.dataclass(frozen=True)
class DataRequest:
    """Which data, in which shape, by which loader.

    Attributes:
        kind: "mnist", "cifar10" or "imagenet": which of them a folder must hold, what synthetic
            images look like, and which augmentation is meant.
        source: "digits", "synthetic" or the path of a folder.
        device: where the batches are wanted.
        batch_size: training images per batch of this process.
        image_size: height and width wanted, in pixels.
        eval_batch_size: the same for test batches; None: `batch_size`.
        loader: "resident" or "workers".
        workers: processes of the "workers" loader; 0 loads in this one. Also those that decode
            image folders for the "resident" loader.
        augment: change training images at random. "cifar10": crops out of the image padded by 4
            black pixels, and left-right flips. "imagenet": crops of random size and shape, resized
            ("workers") or crops of the stored image, which is larger by 8/7 or padded by 4
            ("resident"), and flips. "mnist": nothing.
        mean, std: subtracted and divided by, one value per channel, as shares of 255; None: those
            of the data set. One value holds for all channels, and of several a grey set takes the
            mean.
        shuffle: a new order in each epoch; False: always that of the files.
        channels_last: memory format of the batches.
        seed: any integer; sets order, augmentation and synthetic images.
        rank, world_size: this process among those that share the data.
        synthetic_size: training images of the synthetic set, rounded up to a batch per process.
        classes: of the synthetic set; None: as the kind has. Other sets have their own.

    Raises:
        ValueError: a value that no data can meet.
    """

    kind: str
    source: str
    device: torch.device
    batch_size: int
    image_size: int
    eval_batch_size: int | None = None
    loader: str = "resident"
    workers: int = 2
    augment: bool = False
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    shuffle: bool = True
    channels_last: bool = False
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    synthetic_size: int = 2048
    classes: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r} is none of {', '.join(KINDS)}")
        if self.loader not in ("resident", "workers"):
            raise ValueError(f"loader {self.loader!r} is neither resident nor workers")
        for name in ("batch_size", "image_size", "eval_batch_size", "synthetic_size", "classes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} is less than 1")
        if self.workers < 0:
            raise ValueError(f"workers {self.workers} is less than 0")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not one of {self.world_size}")

    @property
    def test_batch_size(self) -> int:
        return self.eval_batch_size or self.batch_size
