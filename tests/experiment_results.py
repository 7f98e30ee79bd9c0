"""Result files as the trainers leave them, made up: for the tests of tables and figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class ResultFolder:
    """Writes result files below `path`. :meth:`add` takes what is to differ from the defaults."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = 0

    def add(self, **changes: Any) -> Path:
        """One run of 100 iterations in 5 s. Keys of nested parts are given as ``switches__graph``.

        `log` is a list of lines for the .jsonl; without it there is none.
        """
        self._files += 1
        log = changes.pop("log", None)
        result = _defaults()
        if "repeat" in changes:
            result["seed"] = changes["repeat"]
        for name, value in changes.items():
            *parts, last = name.split("__")
            place = result
            for part in parts:
                place = place[part]
            place[last] = value
        result["finished"] = changes.get(
            "finished", f"2026-11-21T04:00:{self._files % 60:02}+00:00"
        )
        path = self.path / result["gpu"] / f"run{self._files}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, allow_nan=False))
        if log is not None:
            lines = (json.dumps(line, allow_nan=False) for line in log)
            path.with_suffix(".jsonl").write_text("".join(f"{line}\n" for line in lines))
        return path

    def add_repeats(self, times: list[float], **changes: Any) -> None:
        """Repeats that took `times` in seconds."""
        for repeat, seconds in enumerate(times):
            self.add(repeat=repeat, repeats=len(times), train_time_s=seconds, **changes)


def interval(step: int, **changes: Any) -> dict[str, Any]:
    line = {"kind": "interval", "step": step, "epoch": 1, "time_s": step / 20, "train_loss": 1.9}
    line |= {"lr": 0.01, "images_per_s": 2500.0, "step_ms": 50.0, "loss_scale": 65536.0}
    line |= {"skipped_steps": 0, "overflow_steps": [], "memory_bytes": 1_500_000_000}
    return line | changes


def evaluation(step: int, time_s: float, accuracy: float | None) -> dict[str, Any]:
    line = {"kind": "evaluation", "step": step, "epoch": 1, "time_s": time_s}
    return line | {"test_loss": 1.6, "test_accuracy": accuracy}


def divergence(step: int = 31) -> dict[str, Any]:
    return {
        "step": step,
        "reason": "the training loss became nan",
        "first": f"output of features.3 (BatchNorm2d), float16, holds inf in step {step}",
        "module": "features.3 (BatchNorm2d)",
        "tensor": "output",
        "batch_norm_dtype": "float16",
        "loss_scale": 1.0,
        "suggestion": "keep BatchNorm in FP32",
    }


def _defaults() -> dict[str, Any]:
    return {
        "format": 1,
        "experiment": "cifar",
        "recipe": "e1",
        "model": "vgg16",
        "data": {
            "source": "synthetic",
            "kind": "cifar10",
            "loader": "resident",
            "workers": None,
            "train_size": 2048,
            "test_size": 512,
            "image_size": 32,
            "augment": False,
            "shuffle": False,
        },
        "gpu": "T4",
        "device": {"type": "cuda", "name": "Tesla T4", "capability": "7.5"},
        "world_size": 1,
        "arm": "fp32",
        "method": "FP32",
        "policy": None,
        "loop": "tuned",
        "batch_size": 128,
        "repeat": 0,
        "repeats": 1,
        "seed": 0,
        "iterations": 100,
        "epochs": 6.25,
        "timed_iterations": 100,
        "switches": {
            "channels_last": True,
            "cudnn_benchmark": True,
            "graph": False,
            "compile": False,
            "deterministic": False,
        },
        "optimizer": {
            "name": "sgd",
            "lr": 0.01,
            "momentum": 0.9,
            "weight_decay": 0.0,
            "clip": None,
            "schedule": "constant",
            "warmup": 0.0,
        },
        "train_time_s": 5.0,
        "images_per_s": {"mean": 2560.0, "min": 2100.0, "max": 2600.0},
        "step_time_ms": {"median": 50.0, "p20": 49.0, "p80": 51.0, "mean": 50.0},
        "memory_bytes": 1_500_000_000,
        "memory_kind": "max_memory_allocated",
        "train_loss": {"last": 1.5, "mean": 1.8},
        "test": {"loss": 1.6, "accuracy": 0.41, "time_s": 0.9},
        "epoch_log": [],
        "loss_scale": 1.0,
        "skipped_steps": 0,
        "diverged": None,
        "kernels": {"cudnn": 91200, "convolution": "cudnn", "batch_norm": "cudnn"},
        "environment": {
            "torch": "2.14.1",
            "ampfuse": "0.1.0",
            "cuda": "13.0",
            "python": "3.11.7",
            "cpu": "Some CPU",
            "git": "0123456789ab",
        },
        "command": ["python", "-m", "ampfuse.experiments.cifar", "--recipe", "e1"],
        "started": "2026-11-21T03:59:00+00:00",
    }
