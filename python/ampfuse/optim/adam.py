"""Adam and AdamW with a fused step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampfuse.optim.fused import FusedOptimizer
from ampfuse.optim.moments import moment_hyper
from ampfuse.optim.states import STATES

_DOC = """{name} with a fused step: a drop-in for :class:`torch.optim.{name}`.

    {reference}. The formula and the state (``step``, ``exp_avg``, ``exp_avg_sq``,
    ``max_exp_avg_sq``) are torch's, computed in FP32; state dicts load both ways.

    Arguments:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: as in torch. Parameters may be
            float32, float16 or bfloat16, in any mixture. A float32 tensor `lr` on the parameters'
            device is read there.
        bias_correction (in a parameter group only): False uses the moments as they are.
        foreach, fused, capturable: accepted and without effect; the step is always fused.
        master_weights: keep an FP32 master (``state[p]["master_param"]``) for each half parameter,
            update that and round it into the parameter. Without, half parameters are updated in
            their own precision, and small updates are lost.
        max_grad_norm: clip all gradients to this L2 norm inside the step, as
            ``torch.nn.utils.clip_grad_norm_``; a non-finite gradient then skips the step.
        skip_nonfinite: skip the step if a gradient holds inf or NaN. A GradScaler and dynamic loss
            scaling do so anyway.
        unscale_grads: after a step that a GradScaler drives, FP32 gradients read unscaled (and not
            clipped), as with torch's fused optimizers; a skipped step leaves them as they were, and
            half ones always stay scaled. False: the step writes 4 bytes less per element, and
            ``.grad`` stays multiplied by the loss scale.

    ``last_step`` tells, on the device, whether the last step was skipped, its gradient norm and
    loss scale.

    Raises:
        TypeError: a parameter of another dtype. ValueError: an argument out of range, or
            ``differentiable=True``.
    """


class _AdamBase(FusedOptimizer):
    _algorithm = "adam"

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        names = STATES[self._algorithm]
        return names if group["amsgrad"] else names[:2]

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            **moment_hyper(group),
            "maximize": bool(group["maximize"]),
            "decoupled": bool(group.get("decoupled_weight_decay", False)),
        }


class Adam(_AdamBase, torch.optim.Adam, replaces=torch.optim.Adam):
    __doc__ = _DOC.format(name="Adam", reference="Kingma and Ba, arXiv:1412.6980")

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
        master_weights: bool = False,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        unscale_grads: bool = True,
    ) -> None:
        self._set_options(master_weights, max_grad_norm, skip_nonfinite, unscale_grads)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
        )


class AdamW(_AdamBase, torch.optim.AdamW, replaces=torch.optim.AdamW):
    __doc__ = _DOC.format(name="AdamW", reference="Loshchilov and Hutter, arXiv:1711.05101")

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
        master_weights: bool = False,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        unscale_grads: bool = True,
    ) -> None:
        self._set_options(master_weights, max_grad_norm, skip_nonfinite, unscale_grads)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
