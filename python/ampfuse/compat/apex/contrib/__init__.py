"""``apex.contrib``: of its many parts, ``groupbn`` and ``optimizers``."""

from ampfuse.compat.apex.contrib import groupbn, optimizers

__all__ = ["groupbn", "optimizers"]
