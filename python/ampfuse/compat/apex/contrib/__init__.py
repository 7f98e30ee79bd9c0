"""``apex.contrib``: of its many parts, ``groupbn``."""

from ampfuse.compat.apex.contrib import groupbn

__all__ = ["groupbn"]
