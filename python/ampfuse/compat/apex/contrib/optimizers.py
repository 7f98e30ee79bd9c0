"""``apex.contrib.optimizers``: the optimizers of 2019, which apex kept there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampfuse.compat.apex import optimizers
from ampfuse.compat.apex.optimizers import FP16_Optimizer as FP16_Optimizer
from ampfuse.compat.apex.optimizers import FusedLAMB as FusedLAMB
from ampfuse.compat.apex.optimizers import FusedSGD as FusedSGD
from ampfuse.optim.param_groups import parameters


class FusedAdam(optimizers.FusedAdam, own_step=False):
    """FusedAdam of 2019, which also steps on gradients that it is given.

    `bias_correction` is a factor of the rate, and so of the weight decay. `max_grad_norm` clips
    each group's gradients to that L2 norm, unless it is 0. `eps_inside_sqrt` raises RuntimeError.
    """

    def __init__(
        self, params: Any, lr: Any = 1e-3, bias_correction: Any = True, betas: Any = (0.9, 0.999),
        eps: float = 1e-8, eps_inside_sqrt: bool = False, weight_decay: float = 0.0,
        max_grad_norm: float = 0.0, amsgrad: bool = False, use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay=weight_decay, amsgrad=amsgrad,
            eps_inside_sqrt=eps_inside_sqrt, max_grad_norm=max_grad_norm, use_mt=use_mt,
        )  # fmt: skip

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Any = None, grads: Any = None, output_params: Any = None, scale: Any = 1.0,
        grad_norms: Any = None,
    ) -> Any:  # fmt: skip
        """One step, on `grads`, or the parameters' own, divided by `scale`. `.grad` stays scaled.

        `grads` and `output_params`, which receive the parameters, rounded, are tensors, or lists of
        them for each group, as many as there are parameters. `grad_norms` are taken anew.
        """
        params = list(parameters(self))
        own = [param.grad for param in params]
        given = own if grads is None else _flat(grads)
        if len(given) != len(params):
            raise ValueError(f"grads has {len(given)} tensors for {len(params)} parameters.")
        if grads is not None or scale != 1.0:
            for param, grad in zip(params, given, strict=True):
                param.grad = None if grad is None else grad.to(param.dtype) / scale
        result = super().step(closure)
        if grads is None and scale != 1.0:
            for param, grad in zip(params, own, strict=True):
                param.grad = grad
        for out, param in zip(_flat(output_params), params, strict=False):
            out.copy_(param)
        return result


def _flat(tensors: Any) -> list[Tensor]:
    listed = [] if tensors is None else list(tensors)
    return [t for each in listed for t in (each if isinstance(each, (list, tuple)) else [each])]
