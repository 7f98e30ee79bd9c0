"""``apex.contrib.optimizers``: the optimizers of 2019, which apex kept there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampfuse.compat.apex import optimizers
from ampfuse.compat.apex.optimizers import FP16_Optimizer as FP16_Optimizer
from ampfuse.compat.apex.optimizers import FusedLAMB as FusedLAMB
from ampfuse.compat.apex.optimizers.base import ApexOptimizer
from ampfuse.optim.param_groups import parameters


class StepsOnGivenGradients(ApexOptimizer, own_step=False):
    """Mixin: the `step` of 2019."""

    @torch.no_grad()
    def step(
        self, closure: Any = None, grads: Any = None, output_params: Any = None, scale: Any = 1.0,
        grad_norms: Any = None,
    ) -> Any:  # fmt: skip
        """One step, on `grads`, or the parameters' own, divided by `scale`. `.grad` stays scaled.

        `grads` and `output_params`, which receive the parameters, rounded, are tensors, or lists of
        them for each group, as many as there are parameters. `grad_norms` are taken anew.
        """
        params = list(parameters(self))
        own: list[Tensor | None] = []
        given, outputs = _flat(grads), _flat(output_params)
        for name, tensors in (("grads", given), ("output_params", outputs)):
            if tensors is not None and len(tensors) != len(params):
                problem = f"{len(tensors)} tensors for {len(params)} parameters"
                raise ValueError(f"{name} has {problem}.")

        def evaluate() -> Any:
            loss = closure() if closure is not None else None
            if given is not None or scale != 1.0:  # copies, as they may be clipped
                own.extend(param.grad for param in params)
                for param, grad in zip(params, own if given is None else given, strict=True):
                    param.grad = None if grad is None else grad.to(param.dtype, copy=True)
            return loss

        earlier = self.most_recent_scale
        self.most_recent_scale *= float(scale)
        try:
            # Not super(): torch has hooked the step of each class that was instantiated.
            result = ApexOptimizer.step(self, evaluate)
            earlier = 1.0
        finally:
            self.most_recent_scale = earlier
            for param, grad in zip(params, own, strict=False):  # none, if none were replaced
                param.grad = grad
        if outputs is not None:
            for out, param in zip(outputs, params, strict=True):
                out.copy_(param)
        return result


def _flat(tensors: Any) -> list[Tensor] | None:
    """The tensors of a list, or of a list for each group."""
    if tensors is None:
        return None
    return [t for each in tensors for t in (each if isinstance(each, (list, tuple)) else [each])]


class FusedSGD(StepsOnGivenGradients, optimizers.FusedSGD, own_step=False):
    """:class:`apex.optimizers.FusedSGD`, which also steps on gradients that it is given."""


class FusedAdam(StepsOnGivenGradients, optimizers.FusedAdam, own_step=False):  # type: ignore[misc]
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
