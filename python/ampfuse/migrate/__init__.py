"""What a script uses of apex, and what that becomes: ``python -m ampfuse.migrate FILE...``."""

from ampfuse.migrate.imports import rewrite_imports
from ampfuse.migrate.uses import Use, find_uses

__all__ = ["Use", "find_uses", "rewrite_imports"]
