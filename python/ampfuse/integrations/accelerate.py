"""Accelerate: levels for an ``Accelerator``, whose way in for a precision is its scaler."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

from accelerate import Accelerator, DistributedType
from torch import Tensor
from torch.optim import Optimizer

from ampfuse import amp
from ampfuse.amp import session as sessions
from ampfuse.integrations import beside, join
from ampfuse.optim.base import count_skipped_steps


def initialize(
    accelerator: Accelerator, models: Any, optimizers: Any, opt_level: str = "O1", **options: Any
) -> Any:
    """:func:`ampfuse.amp.initialize` for a training by `accelerator`.

    Call it before ``accelerator.prepare``, with models on ``accelerator.device``. All methods of
    `accelerator` then do as they do under a ``mixed_precision`` of its own. For
    ``optimizer_step_was_skipped`` the host reads a flag of the device in each step that can be
    skipped. ``accelerator.log`` adds ``skipped_steps/nonfinite`` and ``skipped_steps/spike``.

    A second call with the same level and options adds its models and optimizers to the training.
    It begins another one after ``accelerator.free_memory()``, and where it trains the same weights.

    Raises:
        ValueError: `accelerator` has a ``mixed_precision``, or FSDP; or an earlier call had another
            level or other options. What else is wrong, :func:`ampfuse.amp.initialize` says.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(
            "Accelerate's FSDP replaces the parameters that a level has set up. With FSDP2 do not "
            "use a level: use an optimizer of ampfuse.optim and Accelerate's "
            "mixed_precision='bf16'. Without Accelerate, levels work with fully_shard."
        )
    if accelerator.mixed_precision != "no":
        raise ValueError(
            f"The Accelerator has mixed_precision={accelerator.mixed_precision!r}, but the level "
            "already chooses the dtypes: create it with mixed_precision='no'."
        )
    scaler, arguments = accelerator.scaler, {**options, "opt_level": opt_level}
    is_first = not isinstance(scaler, _Scaler)
    if is_first:
        scaler = _Scaler(accelerator)
    new = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    others = beside(new, () if scaler.is_over else scaler.optimizers)
    if others and arguments != scaler.arguments:
        raise ValueError(
            f"initialize was called on this Accelerator before, with {scaler.arguments}, and now "
            f"with {arguments}. Give all models and optimizers to one call: "
            "initialize(accelerator, [model_a, model_b], [optimizer_a, optimizer_b]). Between two "
            "trainings call accelerator.free_memory()."
        )
    result = amp.initialize(models, optimizers, opt_level=opt_level, **options)
    listed = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers or ())
    if not listed:  # inference
        return result
    scaler.optimizers = join(listed, others)
    scaler.arguments = arguments
    scaler.is_over = False
    if is_first:
        accelerator.scaler = scaler
        accelerator.log = scaler.with_skips(accelerator.log)
        accelerator.free_memory = scaler.ended_by(accelerator.free_memory)
    return result


@dataclasses.dataclass
class _Scaler:
    """The methods of a GradScaler that Accelerate calls, by ``scale_loss``.

    `arguments` are those of ``initialize``. `is_over`: the next ``initialize`` begins a training.
    """

    accelerator: Accelerator
    optimizers: Sequence[Any] = ()
    arguments: dict[str, Any] | None = None
    is_over: bool = False

    def with_skips(self, log: Callable[..., None]) -> Callable[..., None]:
        def log_with_skips(values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            log({**count_skipped_steps(self.optimizers), **values}, *args, **kwargs)

        return log_with_skips

    def ended_by(self, free_memory: Callable[..., Any]) -> Callable[..., Any]:
        def end(*objects: Any) -> Any:
            self.is_over = True
            return free_memory(*objects)

        return end

    def scale(self, loss: Tensor) -> Any:
        """Something to call ``backward`` of: a pass of all `optimizers`."""

        def backward(**kwargs: Any) -> None:
            with amp.scale_loss(loss, self.optimizers) as scaled:
                scaled.backward(**kwargs)

        return types.SimpleNamespace(backward=backward)

    def step(self, optimizer: Any, *args: Any) -> None:
        optimizer.step(*args)
        session = sessions.enabled_of(optimizer)
        if session is not None and optimizer.may_have_skipped and optimizer.last_step.skipped:
            for wrapper in self.accelerator._optimizers:
                if wrapper.optimizer is optimizer:
                    wrapper._accelerate_step_called = False  # how Accelerate knows of a skip

    def update(self) -> None:
        """``scale_loss`` has done it."""

    def state_dict(self) -> dict[str, Any]:
        return amp.state_dict(optimizer=self.optimizers[0])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        amp.load_state_dict(state_dict, optimizer=self.optimizers[0])
