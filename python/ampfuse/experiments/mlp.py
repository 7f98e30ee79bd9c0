"""A three-layer MLP, 4096 wide, as in torch's AMP recipe (E5 of docs/experiments.md).

python -m ampfuse.experiments.mlp --variant fp32 amp-fp16 O2
"""

from __future__ import annotations

import functools
import sys

from ampfuse.experiments.settings import Recipe, Script
from ampfuse.experiments.training import sweep

E5 = Recipe(
    name="e5",
    title="A three-layer MLP, 4096 wide: torch's AMP recipe (T4, 2022)",
    models=("mlp",),
    settings={
        **{"batch_size": 512, "epochs": 3, "image_size": 64, "synthetic_size": 50 * 512},
        **{"optimizer": "sgd", "lr": 1e-3, "momentum": 0.0, "evaluate": False},
    },
    cpu={"synthetic_size": 10 * 512},
)
SCRIPT = Script("mlp", "A three-layer MLP, 4096 wide.", (E5,), data="synthetic")
main = functools.partial(sweep, SCRIPT)

if __name__ == "__main__":
    sys.exit(main())
