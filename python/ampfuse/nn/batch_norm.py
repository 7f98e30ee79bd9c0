"""``nn.BatchNorm2d`` that adds a residual and applies a ReLU in the same pass."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampfuse.nn.functional import Activation, batch_norm_act, is_relu


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
    """What the ``forward`` of torch's batch norms does with `norm` and `x`; then add and ReLU."""
    norm._check_input_dim(x)
    momentum = update_factor(norm)
    # In training, statistics that are not tracked are left alone, if there are any.
    known = norm.track_running_stats or not norm.training
    return batch_norm_act(
        x,
        norm.running_mean if known else None,
        norm.running_var if known else None,
        norm.weight,
        norm.bias,
        norm.training or (norm.running_mean is None and norm.running_var is None),
        momentum,
        norm.eps,
        residual,
        "relu" if relu else None,
    )


def update_factor(norm: _BatchNorm) -> float:
    """The batch's share in the running statistics; in training the batch is counted."""
    batches: Any = norm.num_batches_tracked
    if norm.training and norm.track_running_stats and batches is not None:
        batches.add_(1)
        if norm.momentum is None:  # a cumulative average
            return 1.0 / float(batches)
    return norm.momentum or 0.0
