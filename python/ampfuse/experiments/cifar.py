"""CIFAR-10: VGG16, Wide-ResNet, SE-ResNeXt50 and DenseNet161 (E1 to E3 of docs/experiments.md)."""

import functools
import sys
from collections.abc import Mapping
from typing import Any

from ampfuse.experiments.settings import Recipe, Script
from ampfuse.experiments.sweep import sweep

E1 = Recipe(
    "e1",
    "VGG16: time and memory against batch size (znxlwm, 2018)",
    models=("vgg16",),
    settings={
        "batch_size": 128,
        "iterations": 100,
        "repeats": 5,
        "lr": 0.01,
        "shuffle": False,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
    },
    cpu={"batch_size": 64, "iterations": 20, "repeats": 3},
)
E2 = Recipe(
    "e2",
    "Wide-ResNet-28-10 at O0 to O3 (ceshine, 2019)",
    models=("wrn28_10",),
    settings={
        "batch_size": 128,
        "epochs": 10,
        "lr": 0.1,
        "schedule": "linear",
        "warmup": 0.1,
        "weight_decay": 5e-4,
        "dropout": 0.3,
        "augment": True,
    },
    cpu={"batch_size": 16, "iterations": 6},
)


def _e3(precision: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    # The published comparison doubled batch and epochs together with the level.
    larger = precision == "O2" and flags["model"] == "densenet161"
    return {
        "batch_size": 1024 if larger else 512,
        "epochs": 50 if larger else 25,
        "optimizer": "sgd" if precision == "O3" else "adam",
        "lr": 0.1 if precision == "O3" else 1e-3,
        "schedule": "linear",
        "warmup": 0.1,
        "clip": 1.0,
        "augment": True,
    }


E3 = Recipe(
    "e3",
    "SE-ResNeXt50 and DenseNet161 (ceshine, 2019)",
    models=("seresnext50_32x4d", "densenet161"),
    settings=_e3,
    cpu={"batch_size": 16, "iterations": 6},
)
SCRIPT = Script("cifar", "Image classification on CIFAR-10.", (E1, E2, E3))
main = functools.partial(sweep, SCRIPT)

if __name__ == "__main__":
    sys.exit(main())
