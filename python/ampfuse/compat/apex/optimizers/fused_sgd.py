"""``apex.optimizers.FusedSGD`` on :class:`ampfuse.optim.SGD`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampfuse.compat.apex import amp_C
from ampfuse.compat.apex.optimizers.common import ApexOptimizer, arguments, of_groups
from ampfuse.optim import SGD


class FusedSGD(ApexOptimizer, SGD, own_step=False):
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

    multi_tensor_sgd = staticmethod(amp_C.multi_tensor_sgd)
    wd_after_momentum = of_groups("wd_after_momentum", bool)

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
        given = arguments(locals(), "materialize_master_grads")
        self.construct(given, "wd_after_momentum", lr=0.0 if lr is None else lr)
        self.materialize_master_grads = materialize_master_grads
        self.most_recent_scale = 1.0
        self.scale_set_by_backward = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on gradients divided by ``most_recent_scale``, which is 1 again after it."""
        result = super().step(closure)
        self.most_recent_scale, self.scale_set_by_backward = 1.0, False
        return result

    def _gradient_scale(self) -> tuple[Tensor | None, bool, bool]:
        if self.most_recent_scale == 1:
            return super()._gradient_scale()
        device = self._rows.params[0].device
        scale = torch.full((), self.most_recent_scale, dtype=torch.float32, device=device)
        scaler = self.__dict__.get("grad_scale")
        return (scale if scaler is None else scale * scaler), False, False
