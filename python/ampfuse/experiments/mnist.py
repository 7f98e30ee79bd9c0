"""MNIST: a small CNN (E5 of docs/experiments.md).

python -m ampfuse.experiments.mnist --variant fp32 amp-fp16 O2
python -m ampfuse.experiments.mnist --data digits --epochs 10
"""

from __future__ import annotations

import functools
import sys

from ampfuse.experiments.settings import Recipe, Script
from ampfuse.experiments.training import sweep

E5 = Recipe(
    name="e5",
    title="A small CNN on MNIST (T4, 2022)",
    models=("mnist_cnn",),
    settings={"batch_size": 512, "epochs": 20, "image_size": 28, "optimizer": "adam", "lr": 1e-3},
    cpu={"epochs": 1},
    ours="the optimizer",
)
SCRIPT = Script("mnist", "A small CNN on MNIST.", recipes=(E5,))
main = functools.partial(sweep, SCRIPT)

if __name__ == "__main__":
    sys.exit(main())
