"""CIFAR-10: VGG16, Wide-ResNet, SE-ResNeXt50 and DenseNet161 (E1 to E3 of docs/experiments.md).

python -m ampfuse.experiments.cifar --recipe e1 --variant fp32 O1 O2 --batch-size 128 256 512
python -m ampfuse.experiments.cifar --recipe e2 --variant O0 O1 O2 O3
python -m ampfuse.experiments.cifar --GPU V100 --mode FP16 --batch_size 128 --iteration 100
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

from ampfuse.experiments.settings import Recipe, Script
from ampfuse.experiments.training import sweep

_SGD = {"optimizer": "sgd", "momentum": 0.9}
_HALF = (0.5, 0.5, 0.5)


def _e3(precision: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    settings = {
        **{"batch_size": 512, "epochs": 25, "clip": 1.0, "augment": True, "schedule": "linear"},
        **{"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0, "warmup": 0.1},
    }
    if precision == "O3":
        return {**settings, **_SGD, "lr": 0.1}
    # The published comparison doubled batch and epochs together with the level.
    larger = precision == "O2" and flags["model"] == "densenet161"
    return {**settings, "batch_size": 1024, "epochs": 50} if larger else settings


E1 = Recipe(
    name="e1",
    title="VGG16: time and memory against batch size (znxlwm, 2018)",
    models=("vgg16",),
    settings={
        **{"batch_size": 128, "iterations": 100, "repeats": 5, **_SGD, "lr": 0.01},
        **{"shuffle": False, "mean": _HALF, "std": _HALF},
    },
    cpu={"batch_size": 64, "iterations": 20, "repeats": 3},
)
E2 = Recipe(
    name="e2",
    title="Wide-ResNet-28-10 at O0 to O3 (ceshine, 2019)",
    models=("wrn28_10",),
    settings={
        **{"batch_size": 128, "epochs": 10, "dropout": 0.3, "augment": True, **_SGD},
        **{"lr": 0.1, "weight_decay": 5e-4, "schedule": "linear", "warmup": 0.1},
    },
    cpu={"batch_size": 16, "iterations": 6},
    ours="the peak rate 0.1, the weight decay 5e-4 (both the Wide-ResNet paper's) and the length "
    "of the warm-up",
)
E3 = Recipe(
    name="e3",
    title="SE-ResNeXt50 and DenseNet161 (ceshine, 2019)",
    models=("seresnext50_32x4d", "densenet161"),
    settings=_e3,
    cpu={"batch_size": 16, "iterations": 6},
    ours="the rates, the clipping norm 1, the schedule, and batch and epochs of SE-ResNeXt50",
)
SCRIPT = Script("cifar", "Image classification on CIFAR-10.", recipes=(E1, E2, E3))
main = functools.partial(sweep, SCRIPT)

if __name__ == "__main__":
    sys.exit(main())
