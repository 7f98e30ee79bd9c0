"""Places where a lower floor has what an upper one makes, without knowing it.

Each floor of the package imports lower ones only. Where it shows its users something of an upper
one (``optimizer.meter``, ``amp.advise``), it asks here by the name of the place, and
``ampfuse/__init__.py``, which knows all floors, says what belongs there.
"""

from __future__ import annotations

import pkgutil
from typing import Any

_sources: dict[str, str] = {}


def plug_in(sources: dict[str, str]) -> None:
    """What belongs where, as ``"package:name"`` by place. Nothing is imported until it is used."""
    _sources.update(sources)


def at(place: str) -> Any:
    """What is plugged in at `place`. Raises AttributeError if nothing is."""
    if place not in _sources:
        module, _, name = place.rpartition(".")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return pkgutil.resolve_name(_sources[place])
