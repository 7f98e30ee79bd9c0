"""``apex.amp.handle``: ``scale_loss``, and the object that turns O1's casts on and off."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampfuse import amp
from ampfuse.amp import cast_state
from ampfuse.amp import session as sessions
from ampfuse.amp.casts import Casts, install
from ampfuse.amp.function_casts import restore_registered
from ampfuse.amp.scale_loss import loss_block, session_and_optimizers
from ampfuse.compat.apex.amp import overflow_report
from ampfuse.compat.apex.amp.opt import OptimWrapper
from ampfuse.compat.apex.amp.scaler import LossScaler
from ampfuse.uncompiled import uncompiled


@uncompiled
@loss_block
def scale_loss(
    loss: Tensor,
    optimizers: Any,
    loss_id: int = 0,
    model: Any = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Iterator[Tensor]:
    """:func:`ampfuse.amp.scale_loss`.

    With `delay_overflow_check` the scale adapts when the scaler's ``update_scale()`` is called,
    which also says whether to step.
    """
    with amp.scale_loss(
        loss, optimizers, loss_id, model, delay_unscale, delay_overflow_check
    ) as scaled:
        session, listed = session_and_optimizers(optimizers)
        yield scaled
    scaler = session.loss_scalers[loss_id] if session.enabled else None
    if isinstance(scaler, LossScaler) and not delay_unscale:
        scaler.after_pass(listed, decided=scaler.dynamic and not delay_overflow_check)
        if not delay_overflow_check:
            overflow_report.after_pass(session, loss_id, listed)


class NoOpHandle:
    """The handle where nothing is cast: amp off, and levels that cast the model instead."""

    _is_active = False
    has_cache = False
    verbose = False

    def is_active(self) -> bool:
        return self._is_active

    def _disable_casts(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        """An optimizer with ``scale_loss`` and a ``step`` that skips after an overflow."""
        return OptimWrapper(optimizer, self, num_loss)

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor, optimizer: Any) -> Iterator[Tensor]:
        yield loss

    def _clear_cache(self) -> None:
        """There is none."""

    def _deactivate(self) -> None:
        """Nothing is active."""


class AmpHandle(NoOpHandle):
    """The casts of one ``initialize`` at O1 or O4, or of ``init``, which has no models.

    ``_is_active`` may be set; ``_deactivate()`` also puts registered functions back.
    """

    def __init__(
        self,
        session: sessions.Session,
        models: Sequence[nn.Module] = (),
        enable_caching: bool = True,
        verbose: bool = False,
    ) -> None:
        self._session = session
        self.models = weakref.WeakSet(models)
        self._saved: list[tuple[Any, str, Any]] = []
        self.has_cache, self.verbose = enable_caching, verbose

    @property
    def _is_active(self) -> bool:
        return self._session.everywhere and not cast_state.casts_are_disabled()

    @_is_active.setter
    def _is_active(self, active: bool) -> None:
        self._session.everywhere = bool(active)
        sessions.follow_latest()
        policy = self._session.policy
        assert policy is not None
        casts = Casts.of(policy)
        if not active:
            cast_state.note_forward()  # none is missed
            casts = Casts(inputs=casts.inputs, outputs=casts.outputs)
        for model in self.models:
            install(model, casts)

    def _deactivate(self) -> None:
        """Turn O1's casts off for good and put replaced functions back."""
        self._is_active = False
        self._clear_cache()
        restore_registered()
        for module, name, function in reversed(self._saved):
            setattr(module, name, function)
        self._saved.clear()

    def _save_func(self, module: Any, name: str, function: Any) -> None:
        """Have ``_deactivate`` set ``module.name`` to `function`."""
        self._saved.append((module, name, function))

    def _disable_casts(self) -> contextlib.AbstractContextManager[None]:
        return amp.disable_casts()

    def _clear_cache(self) -> None:
        torch.clear_autocast_cache()

    def scale_loss(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "A handle scales no loss itself. Use optimizer = handle.wrap_optimizer(optimizer) and "
            "optimizer.scale_loss(loss); or amp.initialize and amp.scale_loss(loss, optimizer)."
        )
