"""SGD with a fused step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampfuse.optim.fused import FusedOptimizer
from ampfuse.optim.options import Options, Unpack


class SGD(FusedOptimizer, torch.optim.SGD, algorithm="sgd", replaces=torch.optim.SGD):
    """SGD with momentum and a fused step: a drop-in for :class:`torch.optim.SGD`.

    The formula and the state (``momentum_buffer``) are torch's, computed in FP32; state dicts load
    both ways. As in torch, a parameter's buffer starts as its first gradient.

    Arguments:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.
        wd_after_momentum (in a parameter group only): add the weight decay after the momentum
            instead of before it.
        foreach, fused: accepted and ignored; `differentiable` raises ValueError.
        options: see :class:`ampfuse.optim.Options`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        self._construct(locals())
