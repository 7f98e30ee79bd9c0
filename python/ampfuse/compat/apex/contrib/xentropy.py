"""``apex.contrib.xentropy``: the loss of half logits, for each target."""

from __future__ import annotations

from torch import Tensor

from ampfuse.nn import cross_entropy


class SoftmaxCrossEntropyLoss:
    """Called by ``apply``, as the function that apex has, on :func:`ampfuse.nn.cross_entropy`."""

    @staticmethod
    def apply(
        logits: Tensor, labels: Tensor, smoothing: float = 0.0, padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> Tensor:  # fmt: skip
        """The losses of `logits` (N, C) at `labels` (N,), int64; zero at those of `padding_idx`.

        Losses of half logits are FP32 with `half_to_float`; else they have the logits' type.
        """
        losses = cross_entropy(
            logits, labels, ignore_index=padding_idx, label_smoothing=smoothing, reduction="none"
        )
        return losses if half_to_float else losses.to(logits.dtype)
