"""GELU and SiLU behind a bias, or gated, in one pass each way."""

from __future__ import annotations

import torch
from torch import Tensor


def bias_act(x: Tensor, bias: Tensor | None = None, activation: str = "gelu") -> Tensor:
    """``activation(x + bias)``, in FP32 inside and rounded once.

    The product before it need not add the bias (``F.linear(x, weight)``), and the backward pass
    makes the bias's gradient on its way. Fused are float32, float16 and bfloat16 on CPU and CUDA;
    what else there is goes to torch's operations, and so do second derivatives.

    Arguments:
        x: shape (..., columns).
        bias: shape (columns,); float32 or of the dtype of `x`, where it is fused.
        activation: "gelu", "gelu_tanh" (``F.gelu(approximate="tanh")``) or "silu".

    Returns:
        A tensor of the shape and dtype of `x`.

    Raises:
        ValueError: `activation` is none of these.

    Source: ``F.gelu`` (Hendrycks & Gimpel 2016) and ``F.silu`` (Elfwing et al. 2017).
    """
    return torch.ops.ampfuse.activation(x, None, bias, activation)


def gated_act(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """``activation(gate) * up``: SwiGLU with "silu", GeGLU with "gelu" (Shazeer 2020).

    In FP32 inside and rounded once, and both gradients in one pass; see :func:`bias_act`.

    Arguments:
        gate, up: of one shape and dtype, where it is fused.
        activation: as in :func:`bias_act`.

    Returns:
        A tensor of their shape, of the dtype of `gate`.

    Raises:
        ValueError: `activation` is none of these.
    """
    return torch.ops.ampfuse.activation(gate, up, None, activation)
