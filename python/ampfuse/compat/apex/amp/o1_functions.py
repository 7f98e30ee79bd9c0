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
_allows_banned = False  # of the latest call


def replace_functions(allow_banned: bool = False) -> None:
    """Replace what apex's O1 does besides autocast, until ``_deactivate()`` of the handle.

    ``x.cpu()`` returns FP32, ``x **= 2`` makes x FP32, and in-place functions that leave the range
    of half refuse half. So does binary cross-entropy; `allow_banned` computes it in FP32.
    """
    global _allows_banned
    _allows_banned = allow_banned
    for owner, names in ((torch, _IN_PLACE), (Tensor, _METHODS)):
        for name in names.split():
            install_once(owner, name, lambda f: _where_half(f, _refusal(f, f.__name__[:-1]), 1))
    install_once(Tensor, "cpu", _cpu_in_float)
    install_once(Tensor, "__ipow__", lambda f: _where_half(f, lambda x, y: x.float() ** y, 1))
    install_once(F, "binary_cross_entropy", _banned)


def _cpu_in_float(cpu: Any) -> Any:
    return _where_half(cpu, lambda *args, **kwargs: cpu(*args, **kwargs).float(), 1)


def _banned(function: Any) -> Any:
    in_float = float_function(function)  # autocast would refuse other types too
    instead = f"{function.__name__}_with_logits, without the sigmoid before it"
    refuse = _refusal(function, instead)

    def if_allowed(*args: Any, **kwargs: Any) -> Any:
        return (in_float if _allows_banned else refuse)(*args, **kwargs)

    return _where_half(in_float, if_allowed)


def _where_half(function: Any, instead: Any, count: int | None = None) -> Any:
    """`function`, or `instead` of it where autocast is on and an argument is half.

    `count`: only the first ones matter.
    """

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()][:count]
        halves = [x for x in given if isinstance(x, Tensor) and x.dtype in HALF_DTYPES]
        is_cast = any(torch.is_autocast_enabled(x.device.type) for x in halves)
        return (instead if is_cast else function)(*args, **kwargs)

    return chosen


def _refusal(function: Any, instead: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{function.__name__} may leave the range of half types. Call it on x.float(), or use "
            f"{instead}, which returns float32 at O1 and O4."
        )

    return refuse
