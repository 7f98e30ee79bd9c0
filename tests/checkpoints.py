"""Checkpoints that an earlier version wrote, and the weights that it went on to.

    python tests/checkpoints.py    writes tests/data/checkpoints.pt.gz

``test_checkpoints.py`` resumes them. The trainings are those of ``trainings.py``.
"""

from __future__ import annotations

import copy
import gzip
from pathlib import Path
from typing import Any

import torch

import ampfuse
from ampfuse import amp
from cases import KINDS, bf16, f16, f32, make
from trainings import INIT_SCALE, LEVELS, Parameters, Training

FILE = Path(__file__).parent / "data" / "checkpoints.pt.gz"
SAVED_AFTER, STEPS = 3, 6
WRAPPED = ("torch.optim.SGD", "torch.optim.AdamW", "LARC(torch.optim.SGD)", "foreign")


class AtALevel:
    """``scale_loss`` at a level."""

    def __init__(self, level: str, name: str) -> None:
        self.training = Training(level, name, wide=8)

    def train(self, first: int, end: int) -> None:
        self.training.train(range(first, end))

    def state(self) -> dict[str, Any]:
        model, optimizer = self.training.model, self.training.optimizer
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": amp.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.training.model.load_state_dict(state["model"])
        self.training.optimizer.load_state_dict(state["optimizer"])
        amp.load_state_dict(state["amp"])


class UnderAScaler:
    """An optimizer of ampfuse's, with masters, and a GradScaler."""

    def __init__(self, name: str) -> None:
        self.params = Parameters((f32, f16, bf16), largest=20, third=40)
        self.optimizer = make(name, list(self.params), master_weights=True)
        self.scaler = ampfuse.GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=2)

    def train(self, first: int, end: int) -> None:
        for step in range(first, end):
            self.optimizer.zero_grad()
            loss = self.params.loss(step, infinite=step in (1, 4))
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.params.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.params.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])


TRAININGS = {
    **{f"{level} {name}": (AtALevel, level, name) for level in LEVELS for name in WRAPPED},
    **{f"{level} {name}": (AtALevel, level, name) for level in ("O2", "O5") for name in KINDS},
    **{f"scaler {name}": (UnderAScaler, name) for name in KINDS},
}


def start(title: str) -> AtALevel | UnderAScaler:
    """The training of that title, at its start."""
    kind, *arguments = TRAININGS[title]
    return kind(*arguments)


def write() -> None:
    """The state in the middle of each training, and the weights at its end."""
    saved = {}
    for title in TRAININGS:
        training = start(title)
        training.train(0, SAVED_AFTER)
        middle = copy.deepcopy(training.state())
        training.train(SAVED_AFTER, STEPS)
        saved[title] = {"middle": middle, "end": training.state()["model"]}
    FILE.parent.mkdir(exist_ok=True)
    with gzip.open(FILE, "wb") as file:
        torch.save(saved, file)


def read() -> dict[str, Any]:
    """What `write` wrote, by the titles of the trainings."""
    with gzip.open(FILE) as file:
        return torch.load(file, weights_only=True)


if __name__ == "__main__":
    write()
