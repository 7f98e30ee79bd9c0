"""``apex.contrib.xentropy``: the loss of half logits, for each target."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ampfuse.compat.apex.signatures import takes
from ampfuse.nn import cross_entropy


class SoftmaxCrossEntropyLoss:
    """Called by ``apply``, as the function that apex has, on :func:`ampfuse.nn.cross_entropy`."""

    @staticmethod
    @takes("labels smoothing=0.0 padding_idx=0 half_to_float=False", first="logits")
    def apply(logits: Tensor, given: dict[str, Any]) -> Tensor:
        """The losses of `logits` (N, C) at `labels` (N,), int64; zero at those of `padding_idx`.

        Those of half logits are FP32 with `half_to_float`; else they have the logits' type.
        """
        options = {"ignore_index": given["padding_idx"], "label_smoothing": given["smoothing"]}
        losses = cross_entropy(logits, given["labels"], reduction="none", **options)
        return losses if given["half_to_float"] else losses.to(logits.dtype)
