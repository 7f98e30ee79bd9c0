"""``amp.init``: the interface before ``initialize``, which casts everything in the process."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import _pop_mode, _push_mode

from ampfuse.amp import cast_state, weight_cache
from ampfuse.amp import session as sessions
from ampfuse.amp.cast_log import LogCasts
from ampfuse.amp.function_casts import install_registered
from ampfuse.amp.op_casts import OpCasts
from ampfuse.amp.policy import O1, O4
from ampfuse.compat.apex.amp._amp_state import _amp_state
from ampfuse.compat.apex.amp.handle import AmpHandle, NoOpHandle
from ampfuse.compat.apex.amp.rules import op_rules


class InitHandle(AmpHandle):
    """Casts on for this thread until ``_deactivate()``."""

    def __init__(self, session: sessions.Session, enable_caching: bool, verbose: bool) -> None:
        super().__init__(session, verbose=verbose)
        assert session.policy is not None
        assert session.rules is not None
        dtype = session.policy.autocast_type
        assert dtype is not None
        self._has_cache = enable_caching
        self._open = contextlib.ExitStack()
        for device in _device_types():
            # A region without end would keep a cast of last year's weights: no cache of autocast's.
            autocast = torch.autocast(device, dtype=dtype, cache_enabled=False)
            self._open.enter_context(autocast)
        self._open.enter_context(cast_state.inside_forward(dtype))
        weight_cache.set_enabled(enable_caching)
        self._open.callback(weight_cache.set_enabled, True)
        self._casts = OpCasts(session.rules, dtype)
        self._modes = [self._casts, LogCasts()] if verbose else [self._casts]
        for mode in self._modes:
            _push_mode(mode)
        self._is_on = True

    @property
    def _is_active(self) -> bool:
        return self._is_on and AmpHandle._is_active.fget(self)  # type: ignore[attr-defined]

    @_is_active.setter
    def _is_active(self, active: bool) -> None:
        self._session.casts_functions = self._casts.active = bool(active)

    @property
    def has_cache(self) -> bool:
        return self._has_cache

    def _deactivate(self) -> None:
        if self._is_on:
            self._is_on = False
            self._open.close()
            for mode in reversed(self._modes):
                _remove_mode(mode)
        super()._deactivate()


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    patch_type: torch.dtype = torch.float16,
) -> AmpHandle | NoOpHandle:
    """Cast every operation of this thread as O1 does, until the handle's ``_deactivate()``.

    A second call replaces the first. ``amp.initialize`` is the better way: it touches the models
    it is given and nothing else.

    Arguments:
        enabled: False gives a handle that does nothing.
        loss_scale: ignored, as in apex: ``wrap_optimizer`` makes a scale per loss.
        enable_caching: cast a weight once per iteration.
        verbose: log each cast (logger "ampfuse.amp", level INFO).
        allow_banned: compute ``binary_cross_entropy`` on half inputs in FP32 instead of refusing.
        patch_type: float16, or bfloat16 as in ROCm/apex.
    """
    former = getattr(_amp_state, "handle", None)
    if isinstance(former, InitHandle):
        former._deactivate()
    if not enabled:
        _amp_state.handle = NoOpHandle()
        return _amp_state.handle
    policy = O4 if patch_type == torch.bfloat16 else O1
    rules = op_rules(allow_banned=allow_banned)
    session = sessions.Session(policy, verbosity=2 if verbose else 1, rules=rules)
    sessions.set_latest(session)
    install_registered()
    _amp_state.handle = InitHandle(session, enable_caching, verbose)
    return _amp_state.handle


def _device_types() -> set[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return {"cpu"} if accelerator is None else {"cpu", accelerator.type}


def _remove_mode(mode: Any) -> None:
    """Take `mode` out of torch's stack, from under others entered since."""
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)
