"""``apex.contrib.optimizers``: the optimizers of 2019, which apex kept there."""

from __future__ import annotations

from typing import Any

from ampfuse.compat.apex import optimizers
from ampfuse.compat.apex.optimizers import FP16_Optimizer as FP16_Optimizer
from ampfuse.compat.apex.optimizers import FusedLAMB as FusedLAMB
from ampfuse.compat.apex.optimizers import FusedSGD as FusedSGD
from ampfuse.compat.apex.optimizers.of_2019 import StepsOnGivenGradients


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
