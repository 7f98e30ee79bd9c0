"""``apex.contrib``: of its many parts, ``optimizers`` and ``xentropy``."""

from ampfuse.compat.apex.contrib import optimizers, xentropy
