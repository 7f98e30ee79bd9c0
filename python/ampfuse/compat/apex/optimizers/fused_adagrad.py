"""``apex.optimizers.FusedAdagrad`` on :class:`ampfuse.optim.Adagrad`."""

from __future__ import annotations

from typing import Any

from ampfuse.compat.apex import amp_C
from ampfuse.compat.apex.optimizers.common import ApexOptimizer, of_groups
from ampfuse.optim import Adagrad


class FusedAdagrad(ApexOptimizer, Adagrad):
    """:class:`ampfuse.optim.Adagrad` with apex's arguments.

    Arguments:
        lr, eps, weight_decay: as in torch.
        set_grad_none: whether ``zero_grad()`` drops gradients by default, or zeroes them.
        adagrad_w_mode: decoupled weight decay instead of L2 through the gradient.
    """

    multi_tensor_adagrad = staticmethod(amp_C.multi_tensor_adagrad)
    adagrad_w_mode = of_groups("decoupled_weight_decay", int)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.construct(locals(), "decoupled_weight_decay")
