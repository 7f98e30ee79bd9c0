"""``apex.contrib.optimizers``: of its parts, ``FP16_Optimizer``."""

from ampfuse.compat.apex.contrib.optimizers.fp16_optimizer import FP16_Optimizer
