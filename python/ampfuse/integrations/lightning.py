"""Lightning: ``Trainer(plugins=AmpFuse("O2"))``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from ampfuse import amp
from ampfuse.amp import cast_state
from ampfuse.amp import session as sessions
from ampfuse.integrations.fabric import Levels
from ampfuse.optim.base import count_skipped_steps


class AmpFuse(Levels, Precision):
    """Precision plugin for the Trainer.

    A ``training_step`` calls parts of its LightningModule one by one. So each attribute with
    parameters and a ``forward``, those in ModuleList and ModuleDict too, is a model to
    :func:`ampfuse.amp.initialize`: at O2, O3 and O5 it takes any inputs and gives FP32. What is
    between them stays FP32. At O1 and O4 all of a step is under autocast.

    A scheduler that moves on with each step waits at a skipped one. For that the host reads a flag
    of the device in each step that can be skipped. Where the Trainer logs, it also logs
    ``skipped_steps/nonfinite`` and ``skipped_steps/spike``.
    """

    _device_type = "cpu"

    def convert_module(self, module: Any) -> Any:
        # DistributedDataParallel, which comes next, has to see weights of their final type.
        others = torch.distributed.is_available() and torch.distributed.is_initialized()
        if others and module.trainer.state.fn == TrainerFn.FITTING:
            amp.initialize(list(_parts(module)), None, **self._options)
        return module

    def connect(self, model: Any, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        """Put all at the level; without optimizers, and after a fit, a model stays as it is."""
        bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._device_type = next(bare.parameters(), torch.empty(0)).device.type
        if optimizers and sessions.enabled_of(optimizers[0]) is None:
            self._initialize(list(_parts(bare)), optimizers)
            for config in lr_schedulers if sessions.latest().enabled else []:
                if config.interval == "step" and not config.reduce_on_plateau:
                    cls = type(config.scheduler)
                    config.scheduler.__class__ = type(cls.__name__, (_Held, cls), {})
        return model, optimizers, lr_schedulers

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        cast_state.mark_forward()
        with torch.autocast(self._device_type, self._autocast, enabled=self._autocast is not None):
            yield

    def backward(
        self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """A backward pass of `optimizer`; in manual optimization, of all."""
        optimizers = self._optimizers if optimizer is None else [optimizer]
        with amp.scale_loss(tensor, optimizers) as scaled:
            super().backward(scaled, model, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        """The closure, which has the backward pass, then the step; LBFGS calls it itself."""
        if isinstance(optimizer, LBFGS):
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = self._wrap_closure(model, optimizer, closure)
        optimizer.step(**kwargs)
        trainer = model.trainer
        if (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            model.log_dict(count_skipped_steps(self._optimizers))
        return result

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        amp.clip_grad_norm_(optimizer, clip_val)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The parts of `module` that are called and have parameters."""
    for child in module.children():
        if type(child).forward is nn.Module.forward:
            yield from _parts(child)
        elif next(child.parameters(), None) is not None:
            yield child


class _Held:
    """Mixin: a scheduler that does not move on when the step was skipped."""

    optimizer: Any

    def step(self, *args: Any) -> None:
        if not (self.optimizer.may_have_skipped and self.optimizer.last_step.skipped):
            super().step(*args)  # type: ignore[misc]
