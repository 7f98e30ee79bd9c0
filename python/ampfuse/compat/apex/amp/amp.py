"""``apex.amp.amp``: ``init``, and the functions that O1 replaces besides autocast."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ampfuse import half_ops
from ampfuse.amp import session as sessions
from ampfuse.amp.function_casts import float_function, install_once, install_registered
from ampfuse.amp.policy import O1, O4
from ampfuse.compat.apex.amp._amp_state import _amp_state
from ampfuse.compat.apex.amp.handle import AmpHandle, NoOpHandle
from ampfuse.torch_utils import HALF_DTYPES, eager_module

# apex's module has these names too: scripts have `from apex.amp import amp`.
# isort: off
from ampfuse.compat.apex.amp.frontend import initialize, load_state_dict, state_dict  # noqa: F401
from ampfuse.amp import bfloat16_function, half_function, promote_function  # noqa: F401
from ampfuse.amp import register_bfloat16_function, register_float_function  # noqa: F401
from ampfuse.amp import register_half_function, register_promote_function  # noqa: F401
# isort: on


def init(
    enabled: bool = True, loss_scale: Any = "dynamic", enable_caching: bool = True,
    verbose: bool = False, allow_banned: bool = False, *, patch_type: torch.dtype | None = None,
) -> AmpHandle | NoOpHandle:  # fmt: skip
    """Cast every operation as O1 does, until the handle's ``_deactivate()``, if `enabled`.

    This includes the models of the latest ``initialize``, at any level. A second call replaces the
    first. `patch_type` is float16, or bfloat16 as in ROCm/apex; with `allow_banned` the binary
    cross-entropy of half tensors is computed in FP32, else it raises. The others have no effect.
    """
    former = getattr(_amp_state, "handle", NoOpHandle())
    if isinstance(former, AmpHandle) and former.is_of_init:
        former._is_active = False
    if not enabled:
        _amp_state.handle = NoOpHandle(former.models)
        return _amp_state.handle
    policy = O4 if patch_type == torch.bfloat16 else O1
    casts_cpu = not torch.accelerator.is_available()
    scalers = list(getattr(_amp_state, "loss_scalers", ()))  # amp.state_dict() has them still
    session = sessions.Session(policy, scalers, everywhere=True, casts_cpu=casts_cpu)
    if casts_cpu:
        half_ops.enable_for(policy)
    sessions.set_latest(session)
    install_registered()
    replace_functions(allow_banned)
    casts = {}
    for model in former.models:
        before: Any = eager_module(model)._amp_casts
        with_casts = dataclasses.replace(before, autocast=before.autocast or policy.autocast_type)
        casts[model] = with_casts, before
    handle = AmpHandle(session, casts)
    handle.has_cache, handle.verbose = enable_caching, verbose
    handle.is_of_init = True
    handle._is_active = True
    _amp_state.handle = handle
    return handle


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
