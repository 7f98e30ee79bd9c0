"""``apex.contrib.optimizers``: those of 2019, which apex kept there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampfuse.compat.apex.optimizers import FP16_Optimizer as FP16_Optimizer
from ampfuse.compat.apex.optimizers import fused
from ampfuse.compat.apex.optimizers.fused import FusedLAMB as FusedLAMB
from ampfuse.compat.apex.optimizers.fused import FusedSGD as FusedSGD
from ampfuse.compat.apex.signatures import takes
from ampfuse.optim.param_groups import parameters


class FusedAdam(fused.FusedAdam):
    """:class:`apex.optimizers.FusedAdam` of 2019.

    `bias_correction` is a factor of the rate, and so of the weight decay. `max_grad_norm` clips
    each group's gradients to that L2 norm, unless it is 0. `eps_inside_sqrt` is a RuntimeError.
    """

    _takes = (
        "lr=1e-3 bias_correction=True betas=(0.9,0.999) eps=1e-8 eps_inside_sqrt=False "
        "weight_decay=0.0 max_grad_norm=0.0 amsgrad=False use_mt=False amp_scale_adjustment=1.0"
    )

    @takes("closure=None grads=None output_params=None scale=1.0 grad_norms=None")
    @torch.no_grad()
    def step(self, given: dict[str, Any]) -> Any:
        """One step, on `grads` divided by `scale` if they are given.

        `grads` and `output_params`, which receive the parameters, rounded, are tensors, or lists of
        them for each group, as many as there are parameters. `grad_norms` are taken anew.
        """
        grads, has_grads = _flat(given["grads"]), given["grads"] is not None
        for param, grad in zip(parameters(self), grads, strict=has_grads):
            param.grad = None if grad is None else grad.to(param.dtype) / given["scale"]
        result = super().step(given["closure"])
        for out, param in zip(_flat(given["output_params"]), parameters(self), strict=False):
            out.copy_(param)
        return result


def _flat(tensors: Any) -> list[Tensor]:
    listed = [] if tensors is None else list(tensors)
    return [t for each in listed for t in (each if isinstance(each, (list, tuple)) else [each])]
