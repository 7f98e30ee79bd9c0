"""What apex's O1 does beside the casts of autocast: ``x.cpu()`` gives FP32, and half values are not
overwritten by functions that leave their range."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ampfuse.amp.function_casts import float_function, install_once
from ampfuse.optim.masters import HALF_DTYPES

_IN_PLACE = "acos_ asin_ cosh_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_"
_METHODS = f"{_IN_PLACE} erfinv_ pow_ cumprod_ cumsum_ renorm_"


def install(allow_banned: bool = False) -> None:
    """Replace these functions, until ``_deactivate()`` of the handle or ``amp.restore_torch()``."""
    install_once(Tensor, "cpu", _giving_float)
    for owner, names in ((torch, _IN_PLACE), (Tensor, _METHODS)):
        for name in names.split():
            advice = f"Call {name[:-1]}, which gives float32, or cast the tensor first: x.float()."
            install_once(owner, name, functools.partial(_refusing_half, advice=advice))
    install_once(F, "binary_cross_entropy", float_function if allow_banned else _banned)


def _is_cast(value: Any) -> bool:
    is_half = isinstance(value, Tensor) and value.dtype in HALF_DTYPES
    return is_half and torch.is_autocast_enabled(value.device.type)


def _giving_float(function: Any) -> Any:
    @functools.wraps(function)
    def cpu(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = function(self, *args, **kwargs)
        return out.float() if _is_cast(self) else out

    return cpu


def _refusing_half(function: Any, advice: str) -> Any:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if args and _is_cast(args[0]):
            raise NotImplementedError(
                f"{function.__name__} cannot compute in {args[0].dtype} at O1 and O4. {advice}"
            )
        return function(*args, **kwargs)

    return checked


def _banned(function: Any) -> Any:
    advice = "Use binary_cross_entropy_with_logits, without the sigmoid before it."
    return _refusing_half(float_function(function), advice)  # autocast itself refuses every type
