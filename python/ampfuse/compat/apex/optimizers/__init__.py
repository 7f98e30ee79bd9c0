"""``apex.optimizers`` on :mod:`ampfuse.optim`: the classes translate arguments and state dicts."""

from ampfuse.compat.apex.optimizers.fused import *  # noqa: F403
from ampfuse.compat.apex.optimizers.of_2019 import FP16_Optimizer
