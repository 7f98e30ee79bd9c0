"""``apex.contrib.xentropy``: the loss of half logits, for each target."""

from __future__ import annotations

from torch import Tensor

from ampfuse.nn import cross_entropy


class SoftmaxCrossEntropyLoss:
    """Called by ``apply``, as the function that apex has, on :func:`ampfuse.nn.cross_entropy`."""

    @staticmethod
    def apply(
        logits: Tensor,
        labels: Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> Tensor:
        """The losses of all rows, zero where the label is `padding_idx`.

        Arguments:
            logits: shape (N, C).
            labels: shape (N,), int64.
            smoothing: of the labels.
            padding_idx: a label that does not count.
            half_to_float: losses of half logits are FP32; else they have the logits' type.

        Returns:
            Shape (N,).
        """
        losses = cross_entropy(
            logits, labels, ignore_index=padding_idx, reduction="none", label_smoothing=smoothing
        )
        return losses if half_to_float else losses.to(logits.dtype)
