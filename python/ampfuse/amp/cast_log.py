"""Log each cast of O1 and O4, with the function it is made for: ``verbosity=2``.

What torch does is what is logged. So autocast's casts, those of rules of our own and those of
decorated functions all appear, and a cast that a weight cache saved does not.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_log = logging.getLogger("ampfuse.amp")

# Casts that the program itself asks for, and those of a backward pass.
_CONVERSIONS = {"bfloat16", "double", "float", "half", "to", "type", "type_as"}
_NOT_AMPS = frozenset({*_CONVERSIONS, "__array__", "backward", "grad", "item", "numpy", "tolist"})


class LogCasts(TorchFunctionMode):
    """Logs the casts made for each of torch's functions that is called inside the block."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", repr(func))
        if name in _NOT_AMPS:
            return func(*args, **kwargs)
        with LogCastsFor(name):
            return func(*args, **kwargs)


class LogCastsFor(TorchDispatchMode):
    """Logs the casts between floating point types inside the block, as made for `function`."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.function = function

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            _report(self.function, args[0], result)
        return result


def _report(function: str, source: Tensor, result: Tensor) -> None:
    if source.dtype == result.dtype:
        return
    if not (source.is_floating_point() and result.is_floating_point()):
        return
    before, after = (str(tensor.dtype).removeprefix("torch.") for tensor in (source, result))
    _log.info("%s: %s -> %s, shape %s", function, before, after, tuple(source.shape))
