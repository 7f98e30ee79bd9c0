"""ImageNet: ResNet-18 and 50 (E4 of docs/experiments.md), also under torchrun."""

import functools
import sys
from collections.abc import Mapping
from typing import Any

from ampfuse import hardware
from ampfuse.experiments.settings import Recipe, Script
from ampfuse.experiments.sweep import sweep


def _e4(precision: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    in_epochs = "epochs" in flags
    return {
        "batch_size": 128,
        "iterations": 360,
        "image_size": 224,
        "augment": True,
        "workers": min(4, hardware.core_count()),
        "lr": 0.1,
        "schedule": "steps" if in_epochs else "constant",
        "weight_decay": 1e-4,
        "evaluate": in_epochs,
    }


E4 = Recipe(
    "e4",
    "ResNet-18 and ResNet-50: images per second (2018)",
    models=("resnet18", "resnet50"),
    settings=_e4,
    cpu={"batch_size": 16, "iterations": 12},
)
SCRIPT = Script("imagenet", "ResNets on ImageNet.", (E4,), data=None, distributed=True)
main = functools.partial(sweep, SCRIPT)

if __name__ == "__main__":
    sys.exit(main())
