"""What is told of a run while it runs: ``NAME.jsonl``, a progress bar, TensorBoard on request."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

from tqdm import TqdmWarning
from tqdm.auto import tqdm

from ampfuse.experiments.config import UsageError
from ampfuse.experiments.record import finite
from ampfuse.files import naming

_ON_THE_BAR = (
    ("loss", "train_loss", ".4g"),
    ("img/s", "images_per_s", ".4g"),
    ("test accuracy", "test_accuracy", ".1%"),
)


class RunLog:
    """Takes every step, and the figures of every interval and evaluation: into the .jsonl at
    `path`, onto a bar with that `title`, and into the folder `tensorboard`; None for none of it."""

    def __init__(
        self, path: Path | None = None, title: str | None = None, tensorboard: Path | None = None
    ) -> None:
        self._path = path
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TqdmWarning)  # a notebook without widgets shows text
            hidden = True if title is None else None  # None: tqdm looks where it writes to
            self._bar = tqdm(desc=title, unit="step", disable=hidden, leave=False)
        self._writer: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise UsageError("--tensorboard: pip install tensorboard") from None
            self._writer = SummaryWriter(tensorboard)

    def start(self, total: int, done: int) -> None:
        """A run of `total` steps begins; of a log that is there, the first `done` steps stay."""
        self._bar.reset(total=total)
        self._bar.update(done)
        if self._path:
            lines = self._path.read_text().splitlines() if done and self._path.exists() else []
            kept = [line + "\n" for line in lines if _step_of(line) <= done]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("".join(kept))

    def step(self) -> None:
        self._bar.update()

    def write(self, kind: str, values: dict[str, Any]) -> None:
        """Note the figures of an "interval" or "evaluation" that ended with ``values["step"]``."""
        if self._path:
            with naming(self._path), open(self._path, "a") as file:
                file.write(json.dumps(finite({"kind": kind, **values}), allow_nan=False) + "\n")
        there = (entry for entry in _ON_THE_BAR if values.get(entry[1]) is not None)
        self._bar.set_postfix({label: f"{values[name]:{form}}" for label, name, form in there})
        for name, value in values.items() if self._writer else ():
            if isinstance(value, (int, float)) and name != "step":
                self._writer.add_scalar(name, value, values["step"])

    def close(self) -> None:
        self._bar.close()
        if self._writer:
            self._writer.close()


def _step_of(line: str) -> float:
    """Infinite of half a line, which a killed run may have left."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf
