"""LAMB with a fused step."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampfuse.optim.fused import FusedOptimizer
from ampfuse.optim.options import Options, Unpack


class LAMB(FusedOptimizer, algorithm="lamb"):
    """LAMB with a fused step: Adam whose step of each tensor is as long as the tensor's weights.

    You et al., "Large batch optimization for deep learning", arXiv:1904.00962. With the gradient g
    of a step t, the moments m and v as in Adam, and c1 = 1 - beta1^t, c2 = 1 - beta2^t::

        u = (m / c1) / (sqrt(v / c2) + eps) + weight_decay * p
        p = p - lr * |p| / |u| * u

    The ratio of the norms is taken over each parameter; it is 1 where a norm is zero. State:
    ``step``, ``exp_avg``, ``exp_avg_sq``, in FP32.

    Arguments:
        params, lr, betas, eps, weight_decay: as in :class:`torch.optim.AdamW`.
        bias_correction: False leaves c1 and c2 at 1.
        grad_averaging: the gradient enters m times 1 - beta1; False: as it is.
        decoupled_weight_decay: False adds weight_decay * p to the gradient instead of to u.
        use_nvlamb: the ratio of norms also for groups without weight decay, which otherwise step
            as Adam (NVIDIA's variant).
        options: see :class:`ampfuse.optim.Options`. LAMB recipes mostly have max_grad_norm=1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        decoupled_weight_decay: bool = True,
        use_nvlamb: bool = False,
        **options: Unpack[Options],
    ) -> None:
        self._construct(locals())
