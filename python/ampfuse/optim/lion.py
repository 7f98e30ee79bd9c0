"""Lion with a fused step."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampfuse.optim.fused import FusedOptimizer
from ampfuse.optim.options import Options, Unpack


class Lion(FusedOptimizer, algorithm="lion"):
    """Lion with a fused step: every element moves by the rate, in the direction of a momentum.

    Chen et al., arXiv:2302.06675; the same steps as ``timm.optim.Lion``::

        u = sign(beta1 * m + (1 - beta1) * g)
        p = p - lr * (u + weight_decay * p),    m = beta2 * m + (1 - beta2) * g

    State: ``step`` and ``exp_avg`` (m, in FP32). The paper advises a third to a tenth of AdamW's
    rate, and as many times its weight decay. A NaN in the gradient makes NaN of the weight.

    Arguments:
        params, lr, betas, weight_decay, maximize: as in :class:`torch.optim.AdamW`, with the
            defaults of the paper.
        options: see :class:`ampfuse.optim.Options`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[Options],
    ) -> None:
        self._construct(locals())
