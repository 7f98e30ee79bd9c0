"""``apex_C``: tensors as one flat tensor, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of all `tensors`, one after another, in a new tensor of shape (n,)."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`flat`, of shape (n,), in views of the shapes of `tensors`.

    Raises:
        RuntimeError: `flat` has fewer elements than they.
    """
    sizes = [tensor.numel() for tensor in tensors]
    parts = flat.narrow(0, 0, sum(sizes)).split(sizes)
    return tuple(part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))
