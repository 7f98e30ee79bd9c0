"""Adam and AdamW with a fused step."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampfuse.optim.fused import FusedOptimizer
from ampfuse.optim.options import Options, Unpack

_DOC = """{name} with a fused step: a drop-in for :class:`torch.optim.{name}`.

    {reference}. The formula and the state (``step``, ``exp_avg``, ``exp_avg_sq``,
    ``max_exp_avg_sq``) are torch's, computed in FP32; state dicts load both ways.

    Arguments:
        params, lr, betas, eps, weight_decay, amsgrad, {own}maximize: as in torch.
            Parameters may be float32, float16 or bfloat16, in any mixture. A float32 tensor `lr` on
            the parameters' device is read there: on a GPU no step checks whether it is NaN.
        bias_correction (in a parameter group only): False uses the moments as they are.
        foreach, fused, capturable: accepted and ignored, as the step is always fused;
            `differentiable` raises ValueError.
        options: see :class:`ampfuse.optim.Options`.

    ``last_step`` has, on the device, whether the last step was skipped, its gradient norm and loss
    scale.
    """


class Adam(FusedOptimizer, torch.optim.Adam, algorithm="adam", replaces=torch.optim.Adam):
    __doc__ = _DOC.format(
        name="Adam",
        reference="Kingma and Ba, arXiv:1412.6980",
        own="decoupled_weight_decay, ",
    )

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Options],
    ) -> None:
        self._construct(locals())


class AdamW(FusedOptimizer, torch.optim.AdamW, algorithm="adam", replaces=torch.optim.AdamW):
    __doc__ = _DOC.format(name="AdamW", reference="Loshchilov and Hutter, arXiv:1711.05101", own="")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **options: Unpack[Options],
    ) -> None:
        self._construct(locals())
