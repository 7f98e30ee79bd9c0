"""What an optimizer consists of beside its class."""

from __future__ import annotations

import operator
import weakref
from typing import Any


def member(path: str, doc: str | None = None) -> Any:
    """What a part of an object has, as an attribute of the object."""

    def put(whole: Any, value: Any) -> None:
        part, _, name = path.partition(".")
        setattr(getattr(whole, part), name, value)

    return property(operator.attrgetter(path), put, doc=doc)


class Part:
    """Base of an optimizer's members. It does not keep its optimizer alive."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> Any:
        """The optimizer, as long as somebody has it."""
        return self._optimizer()
