"""Modules on the functions: batch norms, and the last linear layer with its loss."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampfuse import _core
from ampfuse.nn.functional import Activation, Reduction, is_relu, linear_cross_entropy


class BatchNormAct2d(nn.BatchNorm2d):
    """``activation(BatchNorm2d(x) + residual)``.

    State dict, attributes and behaviour in each mode are those of ``nn.BatchNorm2d``.

    Arguments:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as in torch.
        activation: "relu" or None.

    Raises:
        ValueError: an unknown activation.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        activation: Activation = "relu",
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        is_relu(activation)
        self.activation = activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalize `x` (N, C, H, W), add `residual` of the same shape, apply the activation."""
        return normalize(self, x, residual, is_relu(self.activation))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation!r}"


def normalize(norm: _BatchNorm, x: Tensor, residual: Tensor | None, relu: bool) -> Tensor:
    """The ``forward`` of torch's batch norms, of `norm` on `x`; then add and ReLU."""
    norm._check_input_dim(x)
    momentum, batches = norm.momentum, _counted(norm)
    if momentum is None:
        momentum, batches = count_batch(norm), None
    mean, var, eps = norm.running_mean, norm.running_var, norm.eps
    training = norm.training or (mean is None and var is None)
    if norm.training and not norm.track_running_stats:
        mean = var = None  # statistics that are not tracked are left alone, if there are any
    if training:
        F._verify_batch_size(x.size())  # type: ignore[attr-defined]
    tensors = x, residual, norm.weight, norm.bias, mean, var
    return torch.ops.ampfuse.batch_norm_act(*tensors, training, momentum, eps, relu, batches)


def _counted(norm: _BatchNorm) -> Tensor | None:
    """The count of batches, if this is one to count."""
    return norm.num_batches_tracked if norm.training and norm.track_running_stats else None


def count_batch(norm: _BatchNorm) -> float:
    """The batch's share in the running statistics; in training the batch is counted."""
    batches = _counted(norm)
    if batches is not None:
        batches.add_(1)
        if norm.momentum is None:  # a cumulative average
            return 1.0 / float(batches)
    return norm.momentum or 0.0


@contextlib.contextmanager
def recompute_norms() -> Iterator[None]:
    """Forward passes in this block keep fewer activations; results have the same bits.

    Between a batch norm and the convolution that follows it, autograd keeps two tensors of one
    size: the input of each. With this it keeps the first, and the backward pass computes the second
    from it when it needs it, in one more pass over memory each time. This covers the outputs of
    fused batch norms (:func:`ampfuse.nn.fuse`, :class:`BatchNormAct2d`, ``batch_norm_act``)
    to which no residual is added, whatever operation saves them.

    A block around the forward pass and the loss is enough::

        with ampfuse.nn.recompute_norms():
            loss = loss_function(model(x), y)
        loss.backward()

    Under ``torch.compile`` it does nothing: the compiler decides what is kept.

    Source: the memory-efficient DenseNets of Pleiss et al. (arXiv:1707.06990), which share the
    outputs of batch norms and recompute them; ``torch.autograd.graph.saved_tensors_hooks``.
    """
    if torch.compiler.is_compiling():
        yield
        return
    saved = _core.C.SavedTensor
    with torch.autograd.graph.saved_tensors_hooks(saved, saved.unpack):
        yield


# ---- losses --------------------------------------------------------------------------------------


class LinearCrossEntropy(nn.Linear):
    """``F.cross_entropy(linear(x), target)`` without the logits of all rows in memory.

    It is meant for many classes: in a language model with a vocabulary of 128k, the logits and
    their gradient are most of the memory of a step. Here the logits of one block of rows are
    computed, reduced to losses and discarded. The backward pass computes them again, then their
    gradient, and the products with it. That is a third more products in this layer.

    Parameters and state dict are those of ``nn.Linear``.

    Arguments:
        in_features, out_features, bias, device, dtype: as in ``nn.Linear``; classes are features.
        ignore_index, reduction, label_smoothing: as in :func:`ampfuse.nn.cross_entropy`.
        block_rows: rows whose logits are held at a time; None: as many as have 16 million.

    Source: Cut Cross-Entropy (Wijmans et al. 2024) and Liger Kernel (Hsu et al. 2024), which both
    make the gradients in the forward pass, where the loss scale is not known.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        block_rows: int | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.block_rows = label_smoothing, block_rows

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        """The loss of `x` (..., in_features) for `target` (...), int64; without it the logits."""
        if target is None:
            return super().forward(x)
        return linear_cross_entropy(
            x,
            self.weight,
            target,
            self.bias,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            block_rows=self.block_rows,
        )
