"""``apex.optimizers.FusedSGD`` on :class:`ampfuse.optim.SGD`."""

from __future__ import annotations

from typing import Any

from ampfuse.compat.apex.optimizers.common import ApexOptimizer
from ampfuse.optim import SGD


class FusedSGD(ApexOptimizer, SGD):
    """:class:`ampfuse.optim.SGD` with apex's arguments.

    Arguments:
        lr: required, here or in every group.
        momentum, dampening, weight_decay, nesterov: as in torch.
        wd_after_momentum: add the weight decay after the momentum instead of before it.
        materialize_master_grads: accepted and without effect: masters' gradients are made when
            somebody reads them.
        set_grad_none: whether ``zero_grad()`` drops gradients by default, or zeroes them.

    Raises:
        ValueError: an argument out of range, or no lr.
    """

    _counts_steps = False

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        params = list(params)
        if lr is None and not all(isinstance(g, dict) and "lr" in g for g in params):
            raise ValueError("FusedSGD needs a learning rate: pass lr.")
        self.set_grad_none = set_grad_none
        super().__init__(
            params, 0.0 if lr is None else lr, momentum, dampening, weight_decay, nesterov
        )
        self._set_flag("wd_after_momentum", bool(wd_after_momentum))
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False
