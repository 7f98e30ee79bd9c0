"""Apply :class:`~ampfuse.amp.op_rules.OpRules` to every operation inside a ``with`` block."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ampfuse.amp.half_output import casts_are_disabled
from ampfuse.amp.op_rules import OpRules


class OpCasts(TorchFunctionMode):
    """Casts the arguments of torch's functions by `rules`, in this thread, inside the block.

    It sees the functions a program calls, not those that torch calls in them; put
    ``torch.autocast`` around it for these.
    """

    def __init__(self, rules: OpRules, dtype: torch.dtype) -> None:
        super().__init__()
        self.rules = rules
        self.dtype = dtype
        self.active = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.active and not casts_are_disabled():
            name = getattr(func, "__name__", "")  # some callables of torch's have none
            args, kwargs = self.rules.apply(name, self.dtype, args, kwargs)
        return func(*args, **kwargs)
