"""NovoGrad with a fused step."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampfuse.optim.fused import FusedOptimizer
from ampfuse.optim.options import Options, Unpack


class NovoGrad(FusedOptimizer, algorithm="novograd"):
    """NovoGrad with a fused step: momentum on gradients that each tensor's norm divides.

    Ginsburg et al., arXiv:1905.11286. With the gradient g of a step t and its norm `|g|` over the
    parameter::

        v = sqrt(beta2 * v^2 + (1 - beta2) * |g|^2)    (v = |g| at the first step)
        d = v + eps
        m = beta1 * m + (1 - beta1) * g,    p = p - lr * (m / (1 - beta1^t) / d + weight_decay * p)

    State: ``step``, ``exp_avg`` (m, in FP32) and ``exp_avg_norm`` (v, one number: a norm and not
    its square, which could overflow). Each parameter has its own, so that parameters may gain and
    lose their gradients.

    Arguments:
        params, lr, betas, eps, weight_decay: as in :class:`torch.optim.AdamW`.
        bias_correction: False leaves out 1 - beta1^t. (v needs no correction, as it starts at a
            norm; with `init_zero` it is divided by sqrt(1 - beta2^t).)
        grad_averaging: the gradient enters m times 1 - beta1; False: as it is.
        norm_type: 2, or ``inf`` (apex's 0) for the largest magnitude,
            `v = beta2 * v + (1 - beta2) * |g|`.
        init_zero: v starts at zero.
        reg_inside_moment: m = beta1 * m + (1 - beta1) * (g / d + weight_decay * p) and
            p = p - lr * m / (1 - beta1^t).
        options: see :class:`ampfuse.optim.Options`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        norm_type: float = 2,
        init_zero: bool = False,
        reg_inside_moment: bool = False,
        **options: Unpack[Options],
    ) -> None:
        self._construct(locals())
