"""Adagrad with a fused step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampfuse.optim.fused import FusedOptimizer
from ampfuse.optim.options import Options, Unpack


class Adagrad(
    FusedOptimizer, torch.optim.Adagrad, algorithm="adagrad", replaces=torch.optim.Adagrad
):
    """Adagrad with a fused step: a drop-in for :class:`torch.optim.Adagrad`.

    Duchi, Hazan and Singer, JMLR 12, 2011. The formula and the state (``step``, ``sum``) are
    torch's, computed in FP32; state dicts load both ways.

    Arguments:
        params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in torch.
        decoupled_weight_decay (in a parameter group only): the decay acts on the parameter, as in
            AdamW, instead of through the gradient.
        foreach, fused: accepted and ignored; `differentiable` raises ValueError.
        options: see :class:`ampfuse.optim.Options`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        self._construct(locals())
