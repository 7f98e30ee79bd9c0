"""Imports of what is not here end in a sentence that says what takes its place.

The last of the import system's finders is asked for submodules that no other one has found, and
Python looks for a submodule where ``from package import name`` finds no attribute.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any

from ampfuse.compat.names import instead_of

_HERE = "ampfuse.compat.apex"


class LeftOut(importlib.abc.MetaPathFinder):
    """Raises ModuleNotFoundError for every submodule of apex that it is asked for."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        installed = getattr(sys.modules.get("apex"), "__name__", "") == _HERE
        if fullname.startswith((f"{_HERE}.", "apex.") if installed else f"{_HERE}."):
            name = fullname.replace(_HERE, "apex", 1)
            # By another name than the one that Python asked for: of that, it would say nothing.
            raise ModuleNotFoundError(
                f"ampfuse leaves out {name}: use {instead_of(name)}; docs/from_apex.md lists what "
                "becomes of apex's names.",
                name=name,
            )


LEFT_OUT = LeftOut()
