"""``apex.contrib.optimizers``: those of 2019, which apex kept there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampfuse.compat.apex.optimizers import FP16_Optimizer as FP16_Optimizer
from ampfuse.compat.apex.optimizers import fused
from ampfuse.compat.apex.optimizers.fused import FusedLAMB as FusedLAMB
from ampfuse.compat.apex.optimizers.fused import FusedSGD as FusedSGD
from ampfuse.optim.inner import parameters


class FusedAdam(fused.FusedAdam):
    """:class:`apex.optimizers.FusedAdam` of 2019.

    With `bias_correction` the moments' corrections are a factor of the rate, and so of the weight
    decay. `max_grad_norm` clips each group's gradients to that L2 norm; 0: none. `use_mt` and
    `amp_scale_adjustment` have no effect, and `eps_inside_sqrt` is a RuntimeError.
    """

    _takes = (
        "lr=1e-3 bias_correction=True betas=(0.9,0.999) eps=1e-8 eps_inside_sqrt=False "
        "weight_decay=0.0 max_grad_norm=0.0 amsgrad=False use_mt=False amp_scale_adjustment=1.0"
    )

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float = 1.0,
        grad_norms: Any = None,
    ) -> Any:
        """One step, on `grads` divided by `scale` if they are given.

        `grads` and `output_params`, which receive the parameters, rounded, are tensors, or lists of
        them for each group, as many as there are parameters. `grad_norms` are taken anew.
        """
        for param, grad in zip(parameters(self), _flat(grads), strict=grads is not None):
            param.grad = None if grad is None else grad.to(param.dtype) / scale
        result = super().step(closure)
        for out, param in zip(_flat(output_params), parameters(self), strict=False):
            out.copy_(param)
        return result


def _flat(tensors: Any) -> list[Tensor]:
    listed = [] if tensors is None else list(tensors)
    return [t for each in listed for t in (each if isinstance(each, (list, tuple)) else [each])]
