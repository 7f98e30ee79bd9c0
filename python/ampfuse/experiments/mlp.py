"""A perceptron of three layers, 4096 wide, in FP32, torch.amp and O0 to O5.

    python -m ampfuse.experiments.mlp --arm fp32 amp-fp16 O2

The workload of torch's AMP recipe, in E5 of docs/experiments.md.
"""

from __future__ import annotations

import functools
import sys

import torch.nn.functional as F
from torch import Tensor

from ampfuse.experiments.arms import Arm, build_arm
from ampfuse.experiments.run import Run
from ampfuse.experiments.settings import Recipe, Script
from ampfuse.experiments.sweep import main as sweep

E5 = Recipe(
    name="e5",
    title="A 4096-wide perceptron of three layers: torch's AMP recipe (T4, 2022)",
    models=("mlp",),
    settings={
        **{"batch_size": 512, "epochs": 3, "image_size": 64, "synthetic_size": 50 * 512},
        **{"optimizer": "sgd", "lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
        **{"schedule": "constant", "evaluate": False},
    },
    cpu={"synthetic_size": 10 * 512},
)
SCRIPT = Script(
    name="mlp",
    title="A perceptron of three layers, 4096 wide.",
    recipes=(E5,),
    data="synthetic",
)


def build(run: Run) -> Arm:
    """The perceptron with an optimizer, in the precision of the run's arm."""
    return build_arm(run.settings, run.network(), squared_error, run.device)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """To the targets; of images (digits, MNIST) the target is the class as a vector."""
    if not targets.is_floating_point():
        targets = F.one_hot(targets, outputs.shape[1]).to(outputs.dtype)
    return F.mse_loss(outputs, targets)


main = functools.partial(sweep, SCRIPT, build)

if __name__ == "__main__":
    sys.exit(main())
