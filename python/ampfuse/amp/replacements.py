"""Replace attributes of third-party modules and classes, and put them back."""

from __future__ import annotations

from typing import Any

_Place = tuple[Any, str]
_INHERITED = object()


class Replacements:
    """Attributes that were replaced. One that was replaced again since is not put back."""

    def __init__(self) -> None:
        # By the owner's id, as it may not be hashable: the owner, the original and ours.
        self._pairs: dict[tuple[int, str], tuple[Any, Any, Any]] = {}

    def __contains__(self, place: _Place) -> bool:
        return (id(place[0]), place[1]) in self._pairs

    def replace(self, owner: Any, name: str, ours: Any) -> None:
        """Set ``owner.name`` to `ours`."""
        there = vars(owner).get(name, _INHERITED)
        _, original, former = self._pairs.get((id(owner), name), (owner, there, there))
        self._pairs[id(owner), name] = owner, (original if there is former else there), ours
        setattr(owner, name, ours)

    def put_back(self) -> None:
        """Restore the originals."""
        for (_, name), (owner, original, ours) in self._pairs.items():
            if vars(owner).get(name) is not ours:
                continue
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._pairs.clear()
