"""Result files as the experiments leave them, made up: for the tests of tables and figures."""

import copy
import json
from pathlib import Path
from typing import Any


class ResultFolder:
    """Writes result files below `path`. :meth:`add` takes what is to differ from the defaults, a
    field or one of its conditions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = 0

    def add(self, **changes: Any) -> Path:
        """One run of 100 iterations in 5 s."""
        self._files += 1
        result = copy.deepcopy(_RESULT)
        result["finished"] = f"2026-11-21T04:00:{self._files % 60:02}+00:00"
        result["seed"] = changes.get("repeat", 0)
        for name, value in changes.items():
            (result if name in result else result["conditions"])[name] = value
        path = self.path / result["gpu"] / f"run{self._files}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, allow_nan=False))
        return path

    def add_repeats(self, times: list[float], **changes: Any) -> None:
        """Repeats that took `times` in seconds."""
        for repeat, seconds in enumerate(times):
            self.add(repeat=repeat, time_s=seconds, **changes)


def divergence(step: int = 31) -> dict[str, Any]:
    return {"step": step, "reason": "the training loss became nan"}


_RESULT = {
    "format": 3,
    "recipe": "e1",
    "experiment": "cifar",
    "model": "vgg16",
    "variant": "FP32",
    "gpu": "T4",
    "batch_size": 128,
    "optimizer": "sgd",
    "repeat": 0,
    "seed": 0,
    "iterations": 100,
    "epochs": 6.25,
    "time_s": 5.0,
    "memory_mb": 1500.0,
    "memory_kind": "max_memory_allocated",
    "accuracy_pct": 41.0,
    "test_loss": 1.6,
    "loss_last": 1.5,
    "loss_mean": 1.8,
    "images_per_s": 2560.0,
    "images_per_s_min": 2100.0,
    "images_per_s_max": 2600.0,
    "loss_scale": 1.0,
    "skipped_steps": 0,
    "diverged": None,
    "conditions": {
        "precision": "fp32",
        "data": "synthetic",
        "kind": "cifar10",
        "loader": "resident",
        "workers": None,
        "train_size": 2048,
        "test_size": 512,
        "image_size": 32,
        "augment": False,
        "shuffle": False,
        "channels_last": True,
        "graph": False,
        "deterministic": False,
        "lr": 0.01,
        "world_size": 1,
        "device": "Tesla T4",
        "torch": "2.14.1",
        "ampfuse": "0.1.0",
        "cuda": "13.0",
    },
    "intervals": [],
    "evaluations": [],
    "finished": "",
}
