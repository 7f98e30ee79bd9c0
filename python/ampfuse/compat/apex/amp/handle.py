"""``apex.amp.handle`` and ``apex.amp.opt``: the object that turns O1's casts on and off.

With it the interface before ``initialize``: the optimizer wrapper of a handle.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ampfuse import amp
from ampfuse.amp import cast_state
from ampfuse.amp import disable_casts as disable_casts
from ampfuse.amp import scale_loss as scale_loss
from ampfuse.amp import session as sessions
from ampfuse.amp.casts import Casts, install
from ampfuse.amp.function_casts import restore_registered
from ampfuse.amp.initialize import make_session
from ampfuse.amp.policy import O1
from ampfuse.compat.apex.amp.scaler import LossScaler
from ampfuse.optim import upgrade


class NoOpHandle:
    """The handle where nothing is cast: amp off, and levels that cast the model instead."""

    _is_active = False
    has_cache = False
    verbose = False

    def __init__(self, models: Iterable[nn.Module] = ()) -> None:
        self.models = weakref.WeakSet(models)

    def is_active(self) -> bool:
        return self._is_active

    _disable_casts: Any = staticmethod(contextlib.nullcontext)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        """An optimizer with ``scale_loss`` and a ``step`` that skips after an overflow."""
        return OptimWrapper(optimizer, self, num_loss)

    def scale_loss(self, loss: Tensor, optimizer: Any) -> contextlib.AbstractContextManager[Tensor]:
        return contextlib.nullcontext(loss)

    def _clear_cache(self) -> None:
        """Nothing is cached."""

    def _deactivate(self) -> None:
        """Nothing is active."""


class AmpHandle(NoOpHandle):
    """The casts of one ``initialize`` at O1 or O4, or of ``init``.

    `casts` has two entries per model: its casts while the handle is active, and those while it is
    not. ``_is_active`` may be set; ``_deactivate()`` also puts registered functions back.
    """

    has_cache, is_of_init = True, False

    def __init__(self, session: sessions.Session, casts: dict[nn.Module, tuple[Casts, Casts]]):
        super().__init__(casts)
        self._session, self._casts = session, weakref.WeakKeyDictionary(casts)
        self._saved: list[Any] = []

    @property
    def _is_active(self) -> bool:
        return self._session.everywhere and not cast_state.casts_are_disabled()

    @_is_active.setter
    def _is_active(self, active: bool) -> None:
        self._session.everywhere = bool(active)
        sessions.follow_latest()
        if not active:
            cast_state.mark_forward()  # none is missed
        for model, (on, off) in self._casts.items():
            install(model, on if active else off)

    def _deactivate(self) -> None:
        """Turn O1's casts off for good and put replaced functions back."""
        self._is_active = False
        self._clear_cache()
        restore_registered()
        for module, name, function in reversed(self._saved):
            setattr(module, name, function)
        self._saved.clear()

    def _save_func(self, *module_name_function: Any) -> None:
        """Have ``_deactivate`` set ``module.name`` to `function`."""
        self._saved.append(module_name_function)

    _disable_casts = staticmethod(disable_casts)
    _clear_cache = staticmethod(torch.clear_autocast_cache)

    @property
    def cache(self) -> dict[Tensor, Tensor]:
        """The weights that were cast: none, as autocast has them and does not show them."""
        return {}

    def remove_cache(self, param: Tensor) -> None:
        """Drop the cast of `param`; autocast drops all of them."""
        self._clear_cache()

    def scale_loss(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "A handle does not scale losses. Use optimizer = handle.wrap_optimizer(optimizer) and "
            "optimizer.scale_loss(loss); or amp.initialize and amp.scale_loss(loss, optimizer)."
        )


class OptimWrapper:
    """An optimizer with a loss scale for each of its losses, which take turns between steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, amp_handle: Any, num_loss: int) -> None:
        self._optimizer, self._amp_handle = optimizer, amp_handle
        self._num_loss, self._loss_idx = num_loss, 0
        session = make_session(O1, num_loss, verbosity=0, scaler=LossScaler)
        self._loss_scaler = session.loss_scalers
        if amp_handle.is_active():
            upgrade(optimizer, master_weights=False)
            optimizer._amp_session = session  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """``amp.scale_loss`` for the next of the losses; RuntimeError after the last."""
        if not self._amp_handle.is_active():
            yield loss
            return
        if self._loss_idx >= self._num_loss:
            raise RuntimeError(
                f"scale_loss was entered more than {self._num_loss} time(s) before step(): pass "
                "num_loss to wrap_optimizer."
            )
        with amp.scale_loss(loss, self._optimizer, loss_id=self._loss_idx) as scaled:
            yield scaled
        self._loss_idx += 1

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's step; nothing if a loss overflowed. A closure: NotImplementedError."""
        if not self._amp_handle.is_active():
            return self._optimizer.step(closure) if closure else self._optimizer.step()
        if closure is not None:
            instead = "Use amp.initialize and amp.scale_loss, and call scale_loss in the closure."
            raise NotImplementedError(f"A wrapped optimizer does not support closures. {instead}")
        self._loss_idx = 0
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # not there yet, in a copy
            raise AttributeError(name)
        return getattr(self._optimizer, name)
