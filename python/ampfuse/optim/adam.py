"""Adam and AdamW with a fused step."""

from __future__ import annotations

from typing import Any

import torch

from ampfuse.optim.fused import FusedOptimizer, moment_hyper

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
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if group["amsgrad"] else names

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            **moment_hyper(group),
            "maximize": bool(group["maximize"]),
            "decoupled": bool(group.get("decoupled_weight_decay", False)),
        }


class Adam(_AdamBase, torch.optim.Adam):
    __doc__ = _DOC.format(name="Adam", reference="Kingma and Ba, arXiv:1412.6980")


class AdamW(_AdamBase, torch.optim.AdamW):
    __doc__ = _DOC.format(name="AdamW", reference="Loshchilov and Hutter, arXiv:1711.05101")
