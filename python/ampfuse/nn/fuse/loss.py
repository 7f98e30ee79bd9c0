"""The loss of transformers' causal language models, from half logits."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ampfuse.nn.functional import cross_entropy


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The ``ForCausalLMLoss`` of transformers without its FP32 copy of the logits."""
    if shift_labels is None:  # each token predicts the next one
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    rows, target = logits.view(-1, vocab_size), shift_labels.reshape(-1).to(logits.device)
    if num_items_in_batch is None:
        return cross_entropy(rows, target, ignore_index=ignore_index)
    total = cross_entropy(rows, target, ignore_index=ignore_index, reduction="sum")
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def replace_loss(model: nn.Module) -> bool:
    """Give `model` this loss; False unless it is such a model, without a custom loss."""
    if not type(model).__module__.startswith("transformers.") or "_loss_function" in vars(model):
        return False
    if getattr(getattr(model, "loss_function", None), "__name__", "") != "ForCausalLMLoss":
        return False
    vars(model)["_loss_function"] = causal_lm_loss  # where the property loss_function keeps it
    return True


def restore_loss(model: nn.Module) -> None:
    if vars(model).get("_loss_function") is causal_lm_loss:
        del model._loss_function
