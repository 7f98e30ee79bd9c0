"""Attributes of other people's modules and classes, with something of ours in their place."""

from __future__ import annotations

from typing import Any

_Place = tuple[Any, str]
_INHERITED = object()


class Replacements:
    """What was replaced. Where somebody else has replaced it since, it is not put back."""

    def __init__(self) -> None:
        # By an owner's id, for it may have no hash: itself, the original and ours.
        self._pairs: dict[tuple[int, str], tuple[Any, Any, Any]] = {}

    def __contains__(self, place: _Place) -> bool:
        return (id(place[0]), place[1]) in self._pairs

    def replace(self, owner: Any, name: str, ours: Any) -> None:
        """Have ``owner.name`` be `ours`."""
        there = vars(owner).get(name, _INHERITED)
        _, original, former = self._pairs.get((id(owner), name), (owner, there, there))
        self._pairs[id(owner), name] = owner, (original if there is former else there), ours
        setattr(owner, name, ours)

    def put_back(self) -> None:
        """Have the originals there again."""
        for (_, name), (owner, original, ours) in self._pairs.items():
            if vars(owner).get(name) is not ours:
                continue
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._pairs.clear()
