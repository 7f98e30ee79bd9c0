"""MNIST: a small CNN (E5 of docs/experiments.md)."""

import functools
import sys

from ampfuse.experiments.settings import Recipe, Script
from ampfuse.experiments.sweep import sweep

E5 = Recipe(
    "e5",
    "A small CNN (T4, 2022)",
    models=("mnist_cnn",),
    settings={"batch_size": 512, "epochs": 20, "image_size": 28, "optimizer": "adam", "lr": 1e-3},
    cpu={"epochs": 1},
)
SCRIPT = Script("mnist", "A small CNN on MNIST.", (E5,))
main = functools.partial(sweep, SCRIPT)

if __name__ == "__main__":
    sys.exit(main())
