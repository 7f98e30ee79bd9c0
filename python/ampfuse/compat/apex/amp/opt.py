"""``apex.amp.opt``: the optimizer wrapper of the oldest interface, ``amp.init``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ampfuse import amp
from ampfuse.amp import session as sessions
from ampfuse.amp.policy import O1
from ampfuse.compat.apex.amp.scaler import LossScaler
from ampfuse.optim import upgrade


class OptimWrapper:
    """An optimizer with a loss scale of its own for each of its `num_loss` losses.

    ``scale_loss`` blocks before a ``step`` take the scalers in turn, and their gradients add up.
    Everything else is the optimizer's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, amp_handle: Any, num_loss: int) -> None:
        self._optimizer = optimizer
        self._amp_handle = amp_handle
        self._num_loss = num_loss
        self._loss_idx = 0
        self._loss_scaler = [LossScaler("dynamic") for _ in range(num_loss)]
        if amp_handle.is_active():
            upgrade(optimizer, master_weights=False)
            session = sessions.Session(O1, list(self._loss_scaler), verbosity=0)
            optimizer._amp_session = session  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def scale_loss(self, loss: Tensor) -> Iterator[Tensor]:
        """As ``amp.scale_loss``, for the next of the losses.

        Raises:
            RuntimeError: more blocks than `num_loss` since the last step.
        """
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
        """The optimizer's step; nothing if a loss overflowed.

        Raises:
            NotImplementedError: a closure was given: losses are scaled one by one here.
        """
        if not self._amp_handle.is_active():
            return self._optimizer.step(closure) if closure else self._optimizer.step()
        if closure is not None:
            raise NotImplementedError(
                "A wrapped optimizer takes no closure. Use amp.initialize and amp.scale_loss, and "
                "call scale_loss in the closure."
            )
        self._loss_idx = 0
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # not there yet, in a copy
            raise AttributeError(name)
        return getattr(self._optimizer, name)
