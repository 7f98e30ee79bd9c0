"""``apex.contrib``: of its many parts, ``optimizers``."""

from ampfuse.compat.apex.contrib import optimizers
