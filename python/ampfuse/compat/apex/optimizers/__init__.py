"""``apex.optimizers`` on :mod:`ampfuse.optim`: the classes translate arguments and state dicts."""

from ampfuse.compat.apex.optimizers.fp16_optimizer import FP16_Optimizer
from ampfuse.compat.apex.optimizers.fused import *  # noqa: F403
