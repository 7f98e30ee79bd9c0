"""LAMB with a fused step."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampfuse.optim.fused import FusedOptimizer
from ampfuse.optim.moments import moment_hyper
from ampfuse.optim.options import Options, Unpack


class LAMB(FusedOptimizer):
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

    Raises:
        TypeError: a parameter of another dtype than float32, float16 and bfloat16. ValueError: an
            argument out of range.
    """

    _algorithm = "lamb"
    _follows_norms = True

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
        self._set_options(options, locals())
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "grad_averaging": grad_averaging,
            "decoupled_weight_decay": decoupled_weight_decay,
            "use_nvlamb": use_nvlamb,
        }
        super().__init__(params, defaults)

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            **moment_hyper(group),
            "unaveraged": not group["grad_averaging"],
            "decoupled": bool(group["decoupled_weight_decay"]),
            "trust_all": bool(group["use_nvlamb"]),
        }
