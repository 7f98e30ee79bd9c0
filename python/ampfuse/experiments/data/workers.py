"""The usual loader: torch's DataLoader, whose processes open, augment and normalise the images."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, default_collate

from ampfuse.experiments.data.loader import Data, generator, normalised, seed_of
from ampfuse.experiments.data.sets import DataError, ImageFiles, ImageSet, Pixels

# Numbers of a batch's images; seed and epoch, or None where nothing is drawn.
Key = tuple[list[int], tuple[int, int] | None]


class WorkersData(Data):
    """Batches whose images processes open, augment and normalise, one by one.

    Augmented images are crops out of the image padded by 4 black pixels ("cifar10") or crops of
    random size and shape, resized ("imagenet"), and mirrored at random.

    Its batches raise DataError for a file that cannot be read. Only one pass over the training
    batches, and one over the test batches, runs at a time: the next one ends it.
    """

    def _prepare(self, images: ImageSet) -> None:
        from torchvision.transforms import v2

        size, cuda = self.image_size, self.device.type == "cuda"
        plain = []  # images in memory have the size wanted already
        if isinstance(images.train, ImageFiles):
            plain = [v2.Resize(shorter_edge(size)), v2.CenterCrop(size)]
        augment = [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()]
        if self.kind == "cifar10":
            augment[0] = v2.RandomCrop(size, padding=4)
        normalise = functools.partial(normalised, scale=self._scale, shift=self._shift)

        def feed(split: Pixels | ImageFiles, transforms: list[v2.Transform]) -> Feed:
            samples = Samples(split, *transforms, v2.PILToTensor(), normalise)
            return Feed(samples, self.config.workers, pin_memory=cuda)

        self._train = feed(images.train, augment if self._augments else plain)
        self._test = feed(images.test, plain)
        # Copies have a stream of their own, so that they run beside the arithmetic.
        self._copies = torch.cuda.Stream(self.device) if cuda else None

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        order = self._epoch_order(epoch)[start:].tolist()
        draws = (self.seed, epoch) if self._augments else None
        return self._on_device(self._train.batches(order, draws))

    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = BatchSampler(self._test_share, self.config.batch_size, drop_last=False)
        return self._on_device(self._test.batches(order))

    def close(self) -> None:
        self._train.close()
        self._test.close()

    def _on_device(
        self, batches: Iterator[tuple[Tensor, Tensor]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in batches:
            if self._copies is None:
                yield images.contiguous(memory_format=self._memory_format), labels
                continue
            with torch.cuda.stream(self._copies):
                images = images.to(self.device, non_blocking=True)
                images = images.contiguous(memory_format=self._memory_format)
                labels = labels.to(self.device, non_blocking=True)
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._copies)
            for tensor in (images, labels):
                tensor.record_stream(current)
            yield images, labels


def shorter_edge(image_size: int) -> int:
    """What a file's shorter edge is brought to before the middle is cut out: 256 for 224."""
    return round(image_size * 256 / 224)


class Samples(Dataset[tuple[Tensor, Tensor] | DataError]):
    """By key: the images, transformed one by one and stacked, and their labels, int64 [n].

    What is drawn for an image depends on (seed, epoch, its number) alone, whichever process draws.
    An image that cannot be read is a DataError in place of the batch: raised in a worker process,
    it would arrive with a traceback in its message.
    """

    def __init__(self, split: Pixels | ImageFiles, *transforms: Callable[[Any], Any]) -> None:
        from torchvision.transforms import v2

        self._split, self._transform = split, v2.Compose(transforms)

    def __getitem__(self, key: Key) -> tuple[Tensor, Tensor] | DataError:
        numbers, draws = key
        images = []
        try:
            with torch.random.fork_rng(devices=[]):
                for number in numbers:
                    if draws is not None:
                        # Not torch.manual_seed, which would seed the GPUs too.
                        torch.default_generator.manual_seed(seed_of("sample", *draws, number))
                    images.append(self._transform(self._split[number]))
        except DataError as error:
            return error
        return default_collate(images), self._split.labels[numbers]


class Feed:
    """Batches of `samples`, whose processes live on from one pass over the data to the next."""

    def __init__(self, samples: Samples, workers: int, *, pin_memory: bool = False) -> None:
        self._workers = workers
        self._keys: list[Key] = []  # of the present pass
        self._new_loader = functools.partial(
            DataLoader,
            samples,
            sampler=self._keys,
            batch_size=None,  # a key is a batch
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            worker_init_fn=_ignore_interrupts,
            generator=generator("loader"),  # else it draws a seed from torch's global one
        )
        self._loader = self._new_loader()
        self._pass = self._run()

    def batches(
        self, order: Iterable[list[int]], draws: tuple[int, int] | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """A batch for each list of numbers in `order`. It ends the pass before.

        Raises:
            DataError: of an image, or because a process ended.
        """
        self._pass.close()
        self._keys[:] = ((numbers, draws) for numbers in order)
        self._pass = self._run()
        return self._pass

    def close(self) -> None:
        self._pass.close()
        self._loader = self._new_loader()  # the processes end with the one before

    def _run(self) -> Generator[tuple[Tensor, Tensor], None, None]:
        try:
            # Without a name of its own: an error keeps the names of its frame, and this one would
            # keep the processes until the garbage collector comes, perhaps in one forked since.
            for batch in self._start():
                if isinstance(batch, DataError):
                    raise batch
                yield batch
            return
        except RuntimeError as error:
            lost = str(error).splitlines()[0].rstrip(". ")
            if "DataLoader worker" not in lost:
                raise
        self._loader = self._new_loader()
        raise DataError(
            f"--workers {self._workers}: a loader process ended ({lost}); if memory or shared "
            "memory ran out, give fewer, or --loader resident"
        )

    def _start(self) -> Iterator[Any]:
        """Start a pass, and keep the handler of SIGCHLD that there is.

        torch's raises in the middle of whatever runs when a worker dies. Without it that error
        comes where the next batch is fetched, a few seconds later at most.
        """
        before = signal.getsignal(signal.SIGCHLD)
        batches = iter(self._loader)
        if before not in (None, signal.getsignal(signal.SIGCHLD)):
            signal.signal(signal.SIGCHLD, before)
        return batches


def _ignore_interrupts(worker: int) -> None:
    # Ctrl-C reaches every process of the terminal; what it means is for the main one to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
