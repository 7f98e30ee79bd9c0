"""``apex.optimizers`` on :mod:`ampfuse.optim`."""

from ampfuse.compat.apex.optimizers.fused_adam import FusedAdam
from ampfuse.compat.apex.optimizers.fused_sgd import FusedSGD

__all__ = ["FusedAdam", "FusedSGD"]
