"""Hugging Face Trainer: ``AmpFuseTrainer(..., opt_level="O2")``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from ampfuse import amp
from ampfuse.amp import session as sessions
from ampfuse.integrations.accelerate import initialize
from ampfuse.optim.base import count_skipped_steps


class AmpFuseTrainer(Trainer):
    """:class:`transformers.Trainer` at a level; also ``class Mine(AmpFuseTrainer, OtherTrainer)``.

    Schedulers wait at skipped steps, and logs count these.

    Arguments:
        opt_level, amp_options (a dict): what :func:`ampfuse.amp.initialize` takes. ``fp16`` and
            ``bf16`` of the TrainingArguments have to be False.
        args, kwargs: of the Trainer. ``optimizer_cls_and_kwargs`` may name an optimizer of
            ``ampfuse.optim``.
    """

    def __init__(
        self, *args: Any, opt_level: str = "O1", amp_options: Any = None, **kwargs: Any
    ) -> None:
        self._level = {**(amp_options or {}), "opt_level": opt_level}
        super().__init__(*args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The Trainer's, at the level."""
        optimizer = super().create_optimizer(model)
        if sessions.enabled_of(_bare(optimizer)) is None:
            initialize(self.accelerator, self.model, optimizer, **self._level)
        return optimizer

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:  # of training
            logs.update(count_skipped_steps([_bare(self.optimizer)]))
        super().log(logs, *args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Inside the fused step, which rewrites no gradient."""
        return amp.clip_grad_norm_(_bare(self.optimizer), self.args.max_grad_norm)


def _bare(optimizer: Any) -> Any:
    """The optimizer in Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
