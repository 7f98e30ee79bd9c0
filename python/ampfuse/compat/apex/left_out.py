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
        name = _name_in_apex(fullname)
        if name is not None:
            # By another name than the one that Python asked for: of that, it would say nothing.
            raise ModuleNotFoundError(
                f"ampfuse leaves out {name}: use {instead_of(name)}; python -m ampfuse.migrate "
                "SCRIPT lists what a script uses of apex, and what becomes of it.",
                name=name,
            )


def _name_in_apex(fullname: str) -> str | None:
    top, _, rest = fullname.partition(".")
    if top == "apex" and getattr(sys.modules.get("apex"), "__name__", "") == _HERE:
        return fullname if rest else None
    inside = fullname.removeprefix(_HERE + ".")
    return None if inside == fullname else f"apex.{inside}"


LEFT_OUT = LeftOut()
