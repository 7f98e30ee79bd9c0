"""What an optimizer consists of beside its class."""

from __future__ import annotations

import weakref
from typing import Any


class Part:
    """Base of an optimizer's members. It does not keep its optimizer alive."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)

    @property
    def optimizer(self) -> Any:
        """The optimizer, as long as somebody has it."""
        return self._optimizer()
