"""Batches of samples from worker processes that live on from one pass over the data to the next."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from torch.utils.data import DataLoader, Dataset, default_collate

from ampfuse.experiments.data.order import generator
from ampfuse.experiments.data.request import DataError

Key = TypeVar("Key")


class Feed(Generic[Key]):
    """A torch DataLoader that is told for each pass which samples to bring, in which batches.

    A sample that cannot be made is a DataError in its place, which :meth:`batches` raises: raised
    in the process itself, it would arrive with a traceback in its message.
    """

    def __init__(self, samples: Dataset[Any], *, workers: int, pinned: bool = False) -> None:
        self._samples, self._workers, self._pinned = samples, workers, pinned
        self._keys = _Keys[Key]()
        self._loader: DataLoader[Any] | None = None
        self._pass: Iterator[Any] = iter(())

    def batches(self, keys: Iterable[Sequence[Key]]) -> Iterator[Any]:
        """One collated batch for each sequence of keys. It ends the pass before.

        Raises:
            DataError: of a sample, or because a process ended.
        """
        self._end_pass()
        self._pass = self._run(keys)
        return self._pass

    def close(self) -> None:
        self._end_pass()
        self._loader = None  # its processes end with it

    def _end_pass(self) -> None:
        # A generator, which holds the loader's iterator, and that the processes.
        if close := getattr(self._pass, "close", None):
            close()

    def _run(self, keys: Iterable[Sequence[Key]]) -> Iterator[Any]:
        if self._loader is None:
            self._loader = DataLoader(
                self._samples,
                batch_sampler=self._keys,
                num_workers=self._workers,
                persistent_workers=self._workers > 0,
                pin_memory=self._pinned,
                collate_fn=_collate,
                worker_init_fn=_begin,
                generator=generator("loader"),  # else it draws a seed from torch's global one
            )
        self._keys.now = keys
        batches = batch = lost = None
        try:
            with _same_sigchld():
                batches = iter(self._loader)
            for batch in batches:
                if isinstance(batch, DataError):
                    raise batch
                yield batch
        except RuntimeError as error:
            lost = str(error).splitlines()[0].rstrip(". ")
            if "DataLoader worker" not in lost:
                raise
            self._loader = None
        finally:
            # An error holds this frame, and the frame a DataError: the processes would live until
            # the garbage collector finds the loop, perhaps in a process forked since.
            batches = batch = None
        if lost is not None:
            raise DataError(
                f"--workers {self._workers}: a loader process ended ({lost}); if memory or shared "
                "memory ran out, give fewer, or --loader resident"
            )


class _Keys(Generic[Key]):
    """The batch sampler: what the present pass asks for."""

    now: Iterable[Sequence[Key]] = ()

    def __iter__(self) -> Iterator[Sequence[Key]]:
        return iter(self.now)


def _collate(samples: list[Any]) -> Any:
    errors = (sample for sample in samples if isinstance(sample, DataError))
    return next(errors, None) or default_collate(samples)


@contextlib.contextmanager
def _same_sigchld() -> Iterator[None]:
    """Keep the handler of SIGCHLD that there is.

    torch's raises in the middle of whatever runs when a worker dies. Without it that error comes
    where the next batch is fetched, a few seconds later at most.
    """
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGCHLD, before)


def _begin(worker: int) -> None:
    # Ctrl-C reaches every process of the terminal; what it means is for the main one to decide.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
