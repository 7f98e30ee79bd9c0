"""Annotations that the doctor leaves in a profile: steps, and lines that wait for the device.

A line is found by wrapping, while the profile runs, the few functions of torch that wait. That
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

_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep


def _reads_number(self: Tensor, *_: Any) -> bool:
    # With a GPU in use, a tensor of the CPU costs nothing.
    return self.is_cuda or not torch.cuda.is_initialized()


def _has_mask(self: Tensor, index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)


# What may wait, how it is shown, and whether a call with these arguments does.
_WAITS: list[tuple[Any, str, str, Callable[..., bool]]] = [
    *(
        (Tensor, name, f".{name}()", _reads_number)
        for name in ("item", "tolist", "nonzero", "cpu", "masked_select")
    ),
    *((Tensor, f"__{name}__", f"{name}()", _reads_number) for name in ("bool", "float", "int")),
    (Tensor, "__getitem__", "[mask]", _has_mask),
    (torch, "nonzero", ".nonzero()", _reads_number),
    (torch.cuda, "synchronize", ".synchronize()", lambda *_: True),
]


@contextlib.contextmanager
def waits_annotated() -> Iterator[None]:
    """Within it, each call that waits for a GPU (or would, on the CPU) is an annotation.

    Its name is WAIT, the call, and the line of the script: ``"... wait .item() train.py:12"``.
    """
    with contextlib.ExitStack() as stack:
        for owner, name, shown, waits in _WAITS:
            annotated = functools.partial(_annotated, shown, waits)
            stack.enter_context(wrapped(owner, name, annotated))
        yield


@contextlib.contextmanager
def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """In the block a call of ``owner.name`` is ``around(original, ...)``."""
    is_own, original = name in vars(owner), getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)  # was inherited


def _annotated(
    shown: str, waits: Callable[..., bool], call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if not waits(*args):
        return call(*args, **kwargs)
    with record_function(f"{WAIT}{shown} {_line()}"):
        return call(*args, **kwargs)


def _line() -> str:
    """The file and line of the innermost call outside of torch and ampfuse."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.startswith((_OWN, _TORCH)):
        frame = frame.f_back
    path = frame.f_code.co_filename
    relative = os.path.relpath(path) if os.path.isabs(path) else path
    return f"{path if relative.startswith('..') else relative}:{frame.f_lineno}"
