"""``apex.contrib.clip_grad``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ampfuse.compat.apex.signatures import takes


@takes("max_norm norm_type=2.0 error_if_nonfinite=False", first="parameters")
@torch.no_grad()
def clip_grad_norm_(parameters: Any, given: dict[str, Any]) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_``, with norms of half gradients in FP32."""
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [param.grad for param in params if param.grad is not None]
    grads = [grad.float() if grad.itemsize == 2 else grad for grad in grads]
    norm = get_total_norm(grads, given["norm_type"], given["error_if_nonfinite"])
    clip_grads_with_norm_(params, given["max_norm"], norm)
    return norm
