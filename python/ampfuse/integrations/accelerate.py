"""Accelerate: levels for an ``Accelerator``, whose own interface for precision is its scaler."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ampfuse import amp
from ampfuse.amp import session as sessions
from ampfuse.integrations import needs

with needs("accelerate"):
    from accelerate import Accelerator


def initialize(
    accelerator: Accelerator, models: Any, optimizers: Any, opt_level: str = "O1", **options: Any
) -> Any:
    """:func:`ampfuse.amp.initialize` for a training by `accelerator`; call it before ``prepare``.

        accelerator = Accelerator()
        model.to(accelerator.device)
        model, optimizer = initialize(accelerator, model, optimizer, "O2")
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    From then on ``accelerator.backward`` scales the loss, ``clip_grad_norm_`` sees unscaled
    gradients, ``save_state`` and ``load_state`` have the loss scaler, and
    ``optimizer_step_was_skipped`` is right, by which the scheduler waits. For that the host reads a
    flag of the device in each step, if loss scaling is dynamic.

    Raises:
        ValueError: `accelerator` has a ``mixed_precision`` of its own. What else is wrong,
            :func:`ampfuse.amp.initialize` says.
    """
    if accelerator.mixed_precision != "no":
        raise ValueError(
            f"The Accelerator has mixed_precision={accelerator.mixed_precision!r}, and a level "
            "says what is computed in which type already: make it with mixed_precision='no'."
        )
    result = amp.initialize(models, optimizers, opt_level=opt_level, **options)
    listed = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    accelerator.scaler = _Scaler(accelerator, listed)
    return result


@dataclasses.dataclass
class _Scaler:
    """The methods of a GradScaler that Accelerate calls, by ``scale_loss``."""

    accelerator: Accelerator
    optimizers: Sequence[Any]

    def scale(self, loss: Tensor) -> _Loss:
        return _Loss(loss, self.optimizers)

    def step(self, optimizer: Any, *args: Any) -> None:
        optimizer.step(*args)
        session = sessions.enabled_of(optimizer)
        if session is not None and session.is_dynamic and optimizer.last_step.skipped:
            for wrapper in self.accelerator._optimizers:
                if wrapper.optimizer is optimizer:
                    wrapper._accelerate_step_called = False  # how Accelerate knows of a skip

    def update(self) -> None:
        """``scale_loss`` has done it."""

    def state_dict(self) -> dict[str, Any]:
        return amp.state_dict(optimizer=self.optimizers[0])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        amp.load_state_dict(state_dict, optimizer=self.optimizers[0])


@dataclasses.dataclass
class _Loss:
    """A loss whose backward pass is one of `optimizers`."""

    loss: Tensor
    optimizers: Sequence[Any]

    def backward(self, **kwargs: Any) -> None:
        with amp.scale_loss(self.loss, self.optimizers) as scaled:
            scaled.backward(**kwargs)
