"""The functions that apex's O1 replaces besides autocast."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ampfuse.amp.function_casts import float_function, install_once
from ampfuse.torch_utils import HALF_DTYPES

_IN_PLACE = "acos_ asin_ cosh_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_"
_METHODS = f"{_IN_PLACE} erfinv_ pow_ cumprod_ cumsum_ renorm_"


def replace_functions(allow_banned: bool = False) -> None:
    """Replace what apex's O1 does besides autocast, until ``_deactivate()`` of the handle.

    ``x.cpu()`` returns FP32, and in-place functions that leave the range of half refuse half.
    """
    for owner, names in ((torch, _IN_PLACE), (Tensor, _METHODS)):
        for name in names.split():
            install_once(owner, name, _refusing_half)
    install_once(
        Tensor, "cpu", lambda f: _where_half(f, lambda *args, **kwargs: f(*args, **kwargs).float())
    )
    # Autocast would refuse other types too.
    ban = float_function if allow_banned else lambda f: _refusing_half(float_function(f))
    install_once(F, "binary_cross_entropy", ban)


def _where_half(function: Any, instead: Any) -> Any:
    """`function`, or `instead` of it where autocast is on and the first argument is half."""

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        x: Any = args[0] if args else None
        is_half = isinstance(x, Tensor) and x.dtype in HALF_DTYPES
        is_cast = is_half and torch.is_autocast_enabled(x.device.type)
        return (instead if is_cast else function)(*args, **kwargs)

    return chosen


def _refusing_half(function: Any) -> Any:
    name = function.__name__
    logits = f"{name}_with_logits, without the sigmoid before it"
    other = name[:-1] if name.endswith("_") else logits

    def refuse(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{name} may leave the range of {x.dtype}. Call it on x.float(), or use {other}, which "
            "returns float32 at O1 and O4."
        )

    return _where_half(function, refuse)
