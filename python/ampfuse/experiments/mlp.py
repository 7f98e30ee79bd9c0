"""A three-layer MLP, 4096 wide, as in torch's AMP recipe (E5 of docs/experiments.md)."""

import functools
import sys

from ampfuse.experiments.settings import Recipe, Script
from ampfuse.experiments.sweep import sweep

E5 = Recipe(
    "e5",
    "A three-layer MLP, 4096 wide: torch's AMP recipe (T4, 2022)",
    models=("mlp",),
    settings={
        "batch_size": 512,
        "epochs": 3,
        "image_size": 64,
        "synthetic_size": 50 * 512,
        "lr": 1e-3,
        "momentum": 0.0,
        "evaluate": False,
    },
    cpu={"synthetic_size": 10 * 512},
)
SCRIPT = Script("mlp", "A three-layer MLP, 4096 wide.", (E5,), data="synthetic")
main = functools.partial(sweep, SCRIPT)

if __name__ == "__main__":
    sys.exit(main())
