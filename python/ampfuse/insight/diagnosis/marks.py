"""Annotations that the doctor leaves in a profile: steps, and lines that wait for the device.

A line is found by replacing, while the profile runs, the few functions of torch that wait. That
costs a microsecond a call; torch's own stacks (``with_stack``) slow every call of the script.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

BEGIN = "ampfuse.doctor begin"
STEP = "ampfuse.doctor step"
CLOSURE = "ampfuse.doctor closure"  # the forward and backward pass that a step was given
WAIT = "ampfuse.doctor wait "

_OWN = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep


def _reads_number(self: Tensor, *_: Any) -> bool:
    # With a GPU in use, a tensor of the CPU costs nothing.
    return self.is_cuda or not torch.cuda.is_initialized()


def _has_mask(self: Tensor, index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)


_METHODS: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("item", "tolist", "__bool__", "__float__", "__int__"), _reads_number),
    **dict.fromkeys(("nonzero", "cpu", "masked_select"), _reads_number),
    "__getitem__": _has_mask,
}


@contextlib.contextmanager
def waits_marked() -> Iterator[None]:
    """Within it, each call that waits for a GPU (or would, on the CPU) is an annotation.

    Its name is WAIT, the call, and the line of the script: ``"... wait .item() train.py:12"``.
    """
    places: list[tuple[Any, str, Callable[..., bool]]] = [
        *((Tensor, name, waits) for name, waits in _METHODS.items()),
        (torch, "nonzero", _reads_number),
        (torch.cuda, "synchronize", lambda *_: True),
    ]
    missing = object()
    before = [vars(owner).get(name, missing) for owner, name, _ in places]
    try:
        for owner, name, waits in places:
            setattr(owner, name, _marked(getattr(owner, name), name, waits))
        yield
    finally:
        for (owner, name, _), value in zip(places, before, strict=True):
            if value is missing:
                delattr(owner, name)  # was inherited
            else:
                setattr(owner, name, value)


def _marked(call: Callable[..., Any], name: str, waits: Callable[..., bool]) -> Callable[..., Any]:
    shown = {"__bool__": "bool()", "__float__": "float()", "__int__": "int()"}.get(name)
    shown = shown or ("[mask]" if name == "__getitem__" else f".{name}()")

    @functools.wraps(call)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if not waits(*args):
            return call(*args, **kwargs)
        with record_function(f"{WAIT}{shown} {_line()}"):
            return call(*args, **kwargs)

    return marked


def _line() -> str:
    """The file and line of the innermost call outside of torch and ampfuse."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.startswith((_OWN, _TORCH)):
        frame = frame.f_back
    path = frame.f_code.co_filename
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    return f"{path if relative.startswith('..') else relative}:{frame.f_lineno}"
