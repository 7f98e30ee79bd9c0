"""Hugging Face Trainer: ``AmpFuseTrainer(..., opt_level="O2")``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ampfuse import amp
from ampfuse.amp import session as sessions
from ampfuse.integrations import needs
from ampfuse.integrations.accelerate import initialize

with needs("transformers"):
    from transformers import Trainer


class AmpFuseMixin:
    """Put it before a Trainer's class: ``class Mine(AmpFuseMixin, Seq2SeqTrainer)``.

    Arguments:
        opt_level, amp_options: what :func:`ampfuse.amp.initialize` takes. ``fp16`` and ``bf16`` of
            the TrainingArguments have to be False.
        args, kwargs: of the Trainer.

    The optimizer is the Trainer's, made as always; ``optimizer_cls_and_kwargs`` may name one of
    ``ampfuse.optim``. Checkpoints have masters and loss scaler.
    """

    accelerator: Any
    args: Any
    model: nn.Module
    optimizer: Any

    def __init__(
        self,
        *args: Any,
        opt_level: str = "O1",
        amp_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._level = {**(amp_options or {}), "opt_level": opt_level}
        super().__init__(*args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The Trainer's, at the level."""
        optimizer: Any = super().create_optimizer(model)  # type: ignore[misc]
        if sessions.enabled_of(_bare(optimizer)) is None:
            initialize(self.accelerator, self.model, optimizer, **self._level)
        return optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Inside the fused step, which rewrites no gradient."""
        return amp.clip_grad_norm_(_bare(self.optimizer), self.args.max_grad_norm)


class AmpFuseTrainer(AmpFuseMixin, Trainer):
    """:class:`transformers.Trainer` at a level of ampfuse."""


def _bare(optimizer: Any) -> Any:
    """The optimizer in Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)
