"""MNIST, CIFAR-10 and ImageNet from files, digits and synthetic images, as batches on the device.

:func:`open_data` returns the :class:`Data` of a run. Its batches come from worker processes, image
by image, or from the device, which holds the whole set as uint8.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset

from ampfuse.command_line import UsageError
from ampfuse.experiments.settings import WITHOUT_FOLDER, Settings

Batches = Iterator[tuple[Tensor, Tensor]]


class DataError(UsageError):
    """Data is missing, damaged or too large. The message is one line that says what to do."""

    def __init__(self, message: str) -> None:
        own = message.rpartition(f"{type(self).__name__}: ")[2]  # from a worker it has a traceback
        super().__init__(" ".join(own.split()))


def generator(*key: object) -> torch.Generator:
    """A CPU generator seeded by `key`, strings and integers, on any device of the training."""
    # With a sum of seed and epoch, the second epoch of one seed would be the first of the next.
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


# ---- sets ----------------------------------------------------------------------------------------


# Channels, classes, and mean and standard deviation of the pixels.
_PUBLISHED = {
    "mnist": (1, 10, (0.1307,), (0.3081,)),
    "cifar10": (3, 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "imagenet": (3, 1000, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
# What a folder must contain, and the pattern of files that may be damaged. Workers open ImageNet's.
_FILES = {
    "mnist": ("MNIST/raw/ with the four IDX files, or all with .gz", "MNIST/raw/*"),
    "cifar10": ("cifar-10-batches-py/ or cifar-10-python.tar.gz", "cifar-10-*"),
    "imagenet": ("train/ and val/, each with a folder of images for each class", ""),
}


class Split(NamedTuple):
    """Images, uint8 [n, channels, size, size] or the paths of files; labels, int64 [n]."""

    images: Tensor | Sequence[str]
    labels: Tensor


class ImageSet(NamedTuple):
    """`mean` and `std` of the pixels are per channel, scaled to [0, 1]."""

    train: Split
    test: Split
    channels: int
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def resized(images: Tensor, size: int) -> Tensor:
    """uint8 [n, channels, size, size]: bilinear, with antialiasing."""
    if images.shape[2:] == (size, size):
        return images
    # On bytes: several times faster than on floats, and off by at most one of 255.
    return nn.functional.interpolate(images, (size, size), mode="bilinear", antialias=True)


def read_files(kind: str, folder: str, image_size: int) -> ImageSet:
    """The published data set `kind` ("mnist", "cifar10" or "imagenet") in `folder`, as torchvision
    stores it. MNIST and CIFAR-10 are downloaded if they are missing, and resized to `image_size`.
    Raises DataError if the set is missing or damaged or cannot be downloaded."""
    from torchvision import datasets

    root = Path(folder).expanduser()
    try:
        if kind == "imagenet":
            parts = [datasets.ImageFolder(root / name) for name in ("train", "val")]
            if differing := set(parts[0].classes) ^ set(parts[1].classes):
                raise ValueError(f"not in both train and val: {', '.join(sorted(differing))}")
            pairs = (zip(*part.samples, strict=True) for part in parts)
            splits = [Split(paths, torch.tensor(labels)) for paths, labels in pairs]
            return ImageSet(*splits, *_PUBLISHED[kind])._replace(classes=len(parts[0].classes))
        source = datasets.CIFAR10 if kind == "cifar10" else datasets.MNIST
        splits = []
        for train in (True, False):
            part = source(root, train=train, download=True)
            images, labels = torch.as_tensor(part.data), torch.as_tensor(part.targets)
            images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2)
            low, high = labels.min(), labels.max()
            if len(labels) != len(images) or not 0 <= low <= high < 10:
                raise ValueError(f"{len(labels)} labels, {low} to {high}, for {len(images)} images")
            splits.append(Split(resized(images, image_size), labels))
        return ImageSet(*splits, *_PUBLISHED[kind])
    except Exception as error:  # torchvision raises nearly anything for damaged files
        expected, pattern = _FILES[kind]
        files = ", ".join(map(str, sorted(root.glob(pattern) if pattern else ())))
        there = f"; delete these if they are damaged: {files}" if files else ""
        raise DataError(
            f"--data {root}: {kind} could not be read: {error}{there}; expected: {expected}; or "
            "use --data digits or synthetic"
        ) from error


def digits(image_size: int) -> ImageSet:
    """scikit-learn's: 1437 grey images of 8x8 pixels to train and 360 to test, enlarged. The split
    is fixed and stratified."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    pixels, labels = datasets.load_digits(return_X_y=True)
    options = {"test_size": 360, "stratify": labels, "random_state": 0}
    grey = (torch.as_tensor(pixels).view(-1, 1, 8, 8) * (255 / 16)).round().byte()
    images, labels = resized(grey, image_size), torch.as_tensor(labels, dtype=torch.int64)
    parts = train_test_split(range(len(labels)), **options)
    train, test = (Split(images[part], labels[part]) for part in parts)
    std, mean = torch.std_mean(train.images.double() / 255, correction=0)
    return ImageSet(train, test, 1, 10, (mean.item(),), (std.item(),))


_TEST_BATCHES = 4  # at most, of noise


def synthetic(kind: str, settings: Settings, world_size: int) -> ImageSet:
    """Noise in the shape of `kind`. To train, `synthetic_size` images (default: 2048, or more in
    four batches); to test a quarter, but at most four batches per process."""
    channels, classes, *_ = _PUBLISHED[kind]
    random = generator("synthetic", settings.seed)
    together = settings.batch_size * world_size
    count = max(settings.synthetic_size or max(2048, 4 * settings.batch_size), together)
    splits = []
    for n in (count, min(-(-count // 4), _TEST_BATCHES * together)):
        shape = (n, channels, settings.image_size, settings.image_size)
        pixels = torch.randint(256, shape, dtype=torch.uint8, generator=random)
        labels = torch.randint(classes, (n,), generator=random)
        splits.append(Split(pixels, labels))
    return ImageSet(*splits, channels, classes, mean=(0.5,), std=(0.29,))


# ---- batches -------------------------------------------------------------------------------------

_PADDING = 4  # black pixels around images that are cropped


class Data:
    """Batches of one data set on one device.

    ``train_batches(epoch, start=0)`` begins at batch `start`; ``test_batches()`` has the share of
    this process. A batch is images, float32 [n, channels, image_size, image_size], normalised, and
    labels, int64 [n]. Order and augmentation depend on seed and epoch, not on torch's global random
    numbers: a run that is resumed within an epoch sees the same bits.

    `train_size` and `test_size` count images over all processes, `batches_per_epoch` the training
    batches of each process.
    """

    workers: int | None = None  # processes that load images

    def __init__(
        self,
        settings: Settings,
        kind: str,
        images: ImageSet,
        device: torch.device,
        rank: int,
        world_size: int,
    ) -> None:
        self.settings, self.kind, self.device = settings, kind, device
        self.rank, self.world_size = rank, world_size
        self.seed = settings.seed + settings.repeat
        self.channels, self.classes = images.channels, images.classes
        self.image_size = settings.image_size
        self.train_size, self.test_size = len(images.train.labels), len(images.test.labels)
        self.batches_per_epoch = self.train_size // (settings.batch_size * world_size)
        if not self.batches_per_epoch:
            share = f" of each of {world_size} processes" if world_size > 1 else ""
            raise DataError(
                f"--batch-size {settings.batch_size} is more than the "
                f"{self.train_size // world_size} training images{share}: use a smaller one"
            )
        first = self.test_size * rank // world_size
        end = self.test_size * (rank + 1) // world_size
        self._test_share = slice(first, end)
        last = settings.channels_last
        self._memory_format = torch.channels_last if last else torch.contiguous_format
        mean = self._per_channel(settings.mean or images.mean)
        std = self._per_channel(settings.std or images.std)
        # (pixels / 255 - mean) / std, in double precision and rounded once.
        self._scale, self._shift = (1 / (255 * std)).float(), (-mean / std).float()

    def _per_channel(self, values: Sequence[float]) -> Tensor:
        """float64 [channels, 1, 1]; a grey set takes the first of three values."""
        return torch.tensor(values[: self.channels], dtype=torch.float64).view(-1, 1, 1)

    def describe(self) -> dict[str, Any]:
        """The data as result files name them: by the contents of a folder, not its path."""
        data = self.settings.data if self.settings.data in WITHOUT_FOLDER else self.kind
        loader = "resident" if self.workers is None else "workers"
        sizes = {"train_size": self.train_size, "test_size": self.test_size}
        return {"data": data, "kind": self.kind, "loader": loader, "workers": self.workers, **sizes}

    def _epoch_order(self, epoch: int) -> Tensor:
        """Indices of this process's images: int64 [batches_per_epoch, batch_size]. Processes take
        turns, batch by batch."""
        order = torch.arange(self.train_size)
        if self.settings.shuffle:
            random = generator("order", self.seed, epoch)
            order = torch.randperm(self.train_size, generator=random)
        shape = (self.batches_per_epoch, self.world_size, self.settings.batch_size)
        return order[: math.prod(shape)].view(shape)[:, self.rank]


def normalised(pixels: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """uint8 [..., channels, h, w] to float32: the same bits image by image and in batches."""
    return pixels.float().mul_(scale).add_(shift)


class ResidentData(Data):
    """A batch is a gather and a normalisation on the device. Order and crops are drawn on the CPU
    and sent once per epoch; no batch makes the host wait. Augmentation crops the stored images,
    padded by 4 black pixels, and mirrors them at random."""

    def __init__(self, settings: Settings, kind: str, images: ImageSet, *where: Any) -> None:
        super().__init__(settings, kind, images, *where)
        if not isinstance(images.train.images, Tensor):
            raise DataError("--loader resident does not read image files: use --loader workers")
        self._train, self._train_labels = self._stored(*images.train)
        self._test, self._test_labels = self._stored(*(x[self._test_share] for x in images.test))
        if settings.augment:
            self._train = nn.functional.pad(self._train, (0, 0, *(_PADDING,) * 4))
        self._scale, self._shift = self._scale.to(self.device), self._shift.to(self.device)

    def _stored(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [n, h, w, channels], so that a crop copies whole pixels, and the labels."""
        return images.permute(0, 2, 3, 1).contiguous().to(self.device), labels.to(self.device)

    def train_batches(self, epoch: int, start: int = 0) -> Batches:
        order = self._epoch_order(epoch)
        drawn = [order]
        if self.settings.augment:
            random = generator("crops", self.seed, epoch, self.rank)
            top, left = torch.randint(2 * _PADDING + 1, (2, *order.shape), generator=random)
            drawn += [top, left, torch.randint(2, order.shape, generator=random).bool()]
        if self.device.type == "cuda":  # unpinned copies would wait for the device
            drawn = [part.pin_memory() for part in drawn]
        drawn = [part.to(self.device, non_blocking=True)[start:] for part in drawn]
        for chosen, *crop in zip(*drawn, strict=True):
            pixels = self._cropped(chosen, *crop) if crop else self._train.index_select(0, chosen)
            yield self._finished(pixels), self._train_labels.index_select(0, chosen)

    def test_batches(self) -> Batches:
        size = self.settings.batch_size
        parts = zip(self._test.split(size), self._test_labels.split(size), strict=True)
        return ((self._finished(pixels), labels) for pixels, labels in parts)

    def _finished(self, pixels: Tensor) -> Tensor:
        """uint8 [n, h, w, c] to inputs of the network."""
        pixels = pixels.permute(0, 3, 1, 2).contiguous(memory_format=self._memory_format)
        return normalised(pixels, self._scale, self._shift)

    def _cropped(self, chosen: Tensor, top: Tensor, left: Tensor, flip: Tensor) -> Tensor:
        """Crops of the training images with indices `chosen`: uint8 [n, size, size, c]. `top` and
        `left`, int64 [n], are the corners of the crops; `flip`, bool [n], mirrors them."""
        size, (_, height, width, channels) = self.image_size, self._train.shape
        steps = torch.arange(size, device=self.device)
        columns = torch.where(flip[:, None], size - 1 - steps, steps) + left[:, None]
        rows = (chosen * height + top)[:, None] + steps
        pixels = rows[:, :, None] * width + columns[:, None, :]
        # Several times faster on the CPU than indexing by images, rows and columns.
        crops = self._train.view(-1, channels).index_select(0, pixels.view(-1))
        return crops.view(-1, size, size, channels)


class WorkersData(Data):
    """Worker processes open, augment and normalise images one by one. Augmentation crops the image
    padded by 4 black pixels ("cifar10") or resizes crops of random size and shape ("imagenet"), and
    mirrors them at random. Each pass starts its own processes."""

    def __init__(self, settings: Settings, kind: str, images: ImageSet, *where: Any) -> None:
        from torchvision.transforms import v2

        super().__init__(settings, kind, images, *where)
        self.workers, size = settings.workers, self.image_size
        plain = []  # images in memory are resized already
        if not isinstance(images.train.images, Tensor):
            plain = [v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size)]
        cifar = kind == "cifar10"
        crop = v2.RandomCrop(size, padding=_PADDING) if cifar else v2.RandomResizedCrop(size)
        train = [crop, v2.RandomHorizontalFlip()] if settings.augment else plain
        last = v2.PILToTensor(), functools.partial(normalised, scale=self._scale, shift=self._shift)
        self._train = Samples(images.train, v2.Compose([*train, *last]))
        self._test = Samples(images.test, v2.Compose([*plain, *last]))

    def train_batches(self, epoch: int, start: int = 0) -> Batches:
        samples = dataclasses.replace(self._train, draws=(self.seed, epoch))
        return self._on_device(samples, self._epoch_order(epoch)[start:].tolist())

    def test_batches(self) -> Batches:
        share = range(self.test_size)[self._test_share]
        return self._on_device(self._test, BatchSampler(share, self.settings.batch_size, False))

    def _on_device(self, samples: Samples, order: Iterable[list[int]]) -> Batches:
        loader = DataLoader(
            samples,
            batch_sampler=order,
            num_workers=self.settings.workers,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=_ignore_interrupts,
            generator=generator("loader"),  # otherwise it draws from torch's global generator
        )
        for batch in loader:
            images, labels = (part.to(self.device, non_blocking=True) for part in batch)
            yield images.contiguous(memory_format=self._memory_format), labels


@dataclasses.dataclass
class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Transformed images and their labels. The random numbers of an image depend on its index and
    on `draws` (seed, epoch), not on the process."""

    split: Split
    transform: Callable[[Any], Tensor]
    draws: tuple[int, int] = (0, 0)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        from torchvision.datasets.folder import pil_loader

        image = self.split.images[index]
        try:
            image = image if isinstance(image, Tensor) else pil_loader(image)
        except Exception as error:  # decoders raise nearly anything for damaged files
            raise DataError(f"{image}: cannot be read as an image ({error})") from error
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would seed the GPUs too.
            seed = generator("sample", *self.draws, index).initial_seed()
            torch.default_generator.manual_seed(seed)
            return self.transform(image), self.split.labels[index]


def _ignore_interrupts(worker: int) -> None:
    # Ctrl-C reaches every process of the terminal; the main one handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class NormalFeatures(Data):
    """Data of torch's AMP recipe: features and targets from a normal distribution, float32
    [batch, 4096] each, on the device, in a fixed order."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.kind = settings, "features"
        self.classes, self.channels, self.image_size = 0, 1, settings.image_size
        self.batches_per_epoch = max(1, (settings.synthetic_size or 2048) // settings.batch_size)
        test_batches = _TEST_BATCHES if settings.evaluate else 0
        self.train_size = settings.batch_size * self.batches_per_epoch
        self.test_size = settings.batch_size * test_batches
        shape = (2, settings.batch_size, self.image_size**2)
        random = generator("features", settings.seed)  # not the numbers of the weights
        batches = [
            tuple(torch.randn(shape, generator=random).to(device))
            for _ in range(self.batches_per_epoch + test_batches)
        ]
        self._train = batches[: self.batches_per_epoch]
        self._test = batches[self.batches_per_epoch :]

    def train_batches(self, epoch: int, start: int = 0) -> Batches:
        return iter(self._train[start:])

    def test_batches(self) -> Batches:
        return iter(self._test)


def open_data(settings: Settings, device: torch.device, rank: int = 0, world_size: int = 1) -> Data:
    """The data of `settings` on `device`, for process `rank` of `world_size`."""
    if (settings.experiment, settings.data) == ("mlp", "synthetic"):
        return NormalFeatures(settings, device)
    kind = {"cifar": "cifar10", "imagenet": "imagenet"}.get(settings.experiment, "mnist")
    if settings.data == "digits":
        images = digits(settings.image_size)
    elif settings.data == "synthetic":
        images = synthetic(kind, settings, world_size)
    else:
        images = read_files(kind, settings.data, settings.image_size)
    in_memory = isinstance(images.train.images, Tensor)
    loader = settings.loader or ("resident" if in_memory else "workers")
    opened = WorkersData if loader == "workers" else ResidentData
    return opened(settings, kind, images, device, rank, world_size)
