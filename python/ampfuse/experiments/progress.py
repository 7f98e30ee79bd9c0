"""What shows a run while it runs: a progress bar, and TensorBoard on request."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tqdm import TqdmWarning
from tqdm.auto import tqdm

from ampfuse.experiments.config import RunConfig, UsageError
from ampfuse.experiments.training import Observer, Place

if TYPE_CHECKING:
    import argparse


class Progress(Observer):
    """A bar of training steps with the latest figures; TensorBoard files if there is a writer."""

    def __init__(self, title: str, *, shown: bool, writer: Any = None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TqdmWarning)  # a notebook without widgets shows text
            # None: only on a terminal or in a notebook.
            self._bar = tqdm(desc=title, unit="step", disable=None if shown else True, leave=False)
        self._writer = writer

    def total(self, steps: int, done: int) -> None:
        self._bar.reset(total=steps)
        self._bar.update(done)

    def step(self, count: int) -> None:
        self._bar.update(count)

    def interval(self, values: dict[str, Any]) -> None:
        shown = {"loss": values["train_loss"], "img/s": values["images_per_s"]}
        self._bar.set_postfix({k: f"{v:.4g}" for k, v in shown.items() if v is not None})
        self._write(values)

    def evaluation(self, values: dict[str, Any]) -> None:
        if values["test_accuracy"] is not None:
            self._bar.set_postfix({"test accuracy": f"{values['test_accuracy']:.1%}"})
        self._write(values)

    def _write(self, values: dict[str, Any]) -> None:
        if self._writer is None:
            return
        for name, value in values.items():
            if isinstance(value, (int, float)) and name != "step":
                self._writer.add_scalar(name, value, values["step"])

    def close(self) -> None:
        self._bar.close()
        if self._writer is not None:
            self._writer.close()


@contextlib.contextmanager
def observe(
    config: RunConfig, place: Place, name: str, args: argparse.Namespace
) -> Iterator[Progress]:
    """The observer of one run; other processes than the main one show nothing."""
    main = place.world.is_main
    writer = _tensorboard(place, name) if main and args.tensorboard else None
    progress = Progress(config.title, shown=main and not args.quiet, writer=writer)
    try:
        yield progress
    finally:
        progress.close()


def _tensorboard(place: Place, name: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UsageError("--tensorboard: pip install tensorboard") from None
    assert place.folder is not None
    return SummaryWriter(place.folder / "tensorboard" / name)
