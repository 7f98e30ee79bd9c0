"""``apex.amp.handle``: what follows a pass, and the object that turns O1's casts on and off.

With it the interface before ``initialize``: ``amp.init``, and the optimizer wrapper of its handle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ampfuse import amp, half_ops
from ampfuse.amp import cast_state
from ampfuse.amp import scale_loss as scale_loss
from ampfuse.amp import session as sessions
from ampfuse.amp.casts import Casts, install
from ampfuse.amp.function_casts import install_registered, restore_registered
from ampfuse.amp.policy import O1, O4
from ampfuse.compat.apex.amp._amp_state import _amp_state, maybe_print
from ampfuse.compat.apex.amp.o1_functions import replace_functions
from ampfuse.compat.apex.amp.scaler import LossScaler
from ampfuse.optim import upgrade
from ampfuse.torch_utils import Sample, eager_module, is_captured


def after_pass(
    session: sessions.Session, loss_id: int, optimizers: list[Any], delay_unscale: bool,
    delay_overflow_check: bool,
) -> None:  # fmt: skip
    """Called at the end of ``scale_loss``: the scaler learns of the pass, and overflows print."""
    scaler = session.loss_scalers[loss_id]
    if isinstance(scaler, LossScaler) and not delay_unscale:
        has_followed = scaler.dynamic and not delay_overflow_check
        scaler.after_pass(optimizers, scale_has_followed=has_followed)
        if not delay_overflow_check:
            if len(session.loss_scalers) > 1:
                scaler.read_flags()  # those of the optimizers are of the next pass soon
            _report_overflows(session, loss_id, optimizers)


# Passes not reported yet, of all scalers, so that lines are printed in the order of the passes: the
# number of the scaler; its scale and the flags of its optimizers, on their way from the device.
_passes: deque[tuple[int, Sample]] = deque()


def _report_overflows(session: sessions.Session, loss_id: int, optimizers: list[Any]) -> None:
    """Print apex's line for each overflow that is known by now: on a GPU some passes later."""
    scaler, scale = session.loss_scalers[loss_id], session.loss_scalers[loss_id].current
    if not scaler.dynamic or is_captured(scale):
        return
    flags = [optimizer.pass_found_inf_flag for optimizer in optimizers]
    _passes.append((loss_id, Sample(scale, *flags)))
    while _passes and _passes[0][1].has_arrived():
        number, sample = _passes.popleft()
        new_scale, *overflows = sample.values()
        if any(overflows):
            line = f"Gradient overflow.  Skipping step, loss scaler {number} reducing loss scale to"
            maybe_print(f"{line} {new_scale}")


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

    _disable_casts = staticmethod(amp.disable_casts)
    _clear_cache = staticmethod(torch.clear_autocast_cache)

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
        self._loss_scaler = [LossScaler("dynamic") for _ in range(num_loss)]
        if amp_handle.is_active():
            upgrade(optimizer, master_weights=False)
            session = sessions.Session(O1, list(self._loss_scaler), verbosity=0)
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
