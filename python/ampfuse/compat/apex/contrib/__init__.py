"""``apex.contrib``: of its many parts, ``clip_grad``, ``optimizers`` and ``xentropy``."""

from ampfuse.compat.apex.contrib import clip_grad, optimizers, xentropy
