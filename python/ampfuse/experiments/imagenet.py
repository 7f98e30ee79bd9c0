"""ImageNet: ResNet-18 and 50 in FP32, torch.amp and O0 to O5 (E4 of docs/experiments.md).

python -m ampfuse.experiments.imagenet -a resnet50 -b 128 --variant fp32 O2 --data DIR
python -m ampfuse.experiments.imagenet -a resnet18 -b 128 --static-loss-scale 256 --fp16 DIR
torchrun --nproc-per-node 4 -m ampfuse.experiments.imagenet --variant O2 [--fsdp] --data DIR
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

from ampfuse.experiments.settings import Recipe, Script
from ampfuse.experiments.training import sweep


def _e4(precision: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    in_epochs = "epochs" in flags
    return {
        **{"batch_size": 128, "iterations": 360, "image_size": 224, "augment": True},
        **{"optimizer": "sgd", "momentum": 0.9, "lr": 0.1, "weight_decay": 1e-4},
        **{"schedule": "steps" if in_epochs else "constant", "evaluate": in_epochs},
        **{"loader": "workers", "workers": 4},
    }


E4 = Recipe(
    name="e4",
    title="ResNet-18 and ResNet-50: images per second (2018)",
    models=("resnet18", "resnet50"),
    settings=_e4,
    cpu={"batch_size": 16, "iterations": 12},
)
SCRIPT = Script("imagenet", "ResNets on ImageNet.", (E4,), data=None, distributed=True)
main = functools.partial(sweep, SCRIPT)

if __name__ == "__main__":
    sys.exit(main())
