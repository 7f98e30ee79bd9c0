"""apex's optimizers of 2018 and 2019: how FusedAdam stepped then, and FP16_Optimizer.

They were in ``apex.optimizers`` first, and in ``apex.contrib.optimizers`` later.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ampfuse.compat.apex import fp16_utils
from ampfuse.compat.apex.amp.scaler import LossScaler
from ampfuse.optim.fused import FusedOptimizer

# Arguments of FusedAdam's constructor. Any of them makes it step as it did then. The last two have
# no other effect.
_ARGUMENTS = ("eps_inside_sqrt", "max_grad_norm", "use_mt", "amp_scale_adjustment")


class StepsAsIn2019(FusedOptimizer, own_step=False):
    """Mixin of FusedAdam: how it stepped in 2019, if an argument of that time is given.

    The gradients of each group are clipped to its L2 norm `max_grad_norm`, unless that is 0. The
    corrections of the moments are a factor of the rate, and so of the weight decay.
    """

    steps_as_in_2019 = False

    def construct(self, arguments: dict[str, Any]) -> None:
        """As FusedAdam does, after taking the arguments of that time."""
        given = {name: arguments.pop(name) for name in _ARGUMENTS}
        if given["eps_inside_sqrt"]:
            raise RuntimeError(
                "FusedAdam only adds eps outside of the square root, as torch does. Use "
                "fused_adam_cuda.adam with eps_mode=0."
            )
        self.steps_as_in_2019 = any(value is not None for value in given.values())
        apex_optimizer: Any = super()
        apex_optimizer.construct(arguments)
        if self.steps_as_in_2019:
            apex_optimizer.set_in_groups("max_grad_norm", given["max_grad_norm"] or 0.0)

    def _collect(self) -> Any:
        if not self.steps_as_in_2019:
            return super()._collect()
        groups = self.param_groups
        _clip_each_group(self)
        rates = [(group["lr"], group["bias_correction"]) for group in groups]
        counts = self.ensure_bound().steps().split([len(group["params"]) for group in groups])
        try:
            for group, count in zip(groups, counts, strict=True):
                if group["bias_correction"] and len(count):
                    left = [1 - beta ** (count.amax().double() + 1) for beta in group["betas"]]
                    group["lr"] = (group["lr"] * left[1].sqrt() / left[0]).float()
                    group["bias_correction"] = False
            return super()._collect()
        finally:
            for group, (lr, corrects) in zip(groups, rates, strict=True):
                group.update(lr=lr, bias_correction=corrects)


def _clip_each_group(adam: Any) -> None:
    norms = [group["max_grad_norm"] for group in adam.param_groups]
    if len(norms) == 1 and norms[0] > 0:
        adam.clip_once = float(norms[0])  # without a pass of its own
        return
    scale = adam.most_recent_scale * adam.__dict__.get("grad_scale", 1.0)
    for group, norm in zip(adam.param_groups, norms, strict=True):
        if norm > 0:
            grads = [p.grad.float() for p in group["params"] if p.grad is not None]
            clip_grads_with_norm_(group["params"], norm * scale, get_total_norm(grads))


class FP16_Optimizer(fp16_utils.FP16_Optimizer):
    """:class:`apex.fp16_utils.FP16_Optimizer` with other defaults, around any optimizer.

    A dynamic scale, ``cur_scale``, grows after 1000 clean passes and is at least 1. An overflow of
    a static one skips the step too. ``zero_grad`` drops gradients. A user-defined step that takes
    ``grad_norms``, as that of 2019's FusedAdam does, gets the norm of each group.
    """

    def __init__(
        self, init_optimizer: torch.optim.Optimizer, static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False, dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:  # fmt: skip
        args = {"scale_window": 1000, "min_loss_scale": 1.0, **(dynamic_loss_args or {})}
        super().__init__(init_optimizer, static_loss_scale, dynamic_loss_scale, args, verbose)

    def set_loss_scaler(self, scaler: LossScaler) -> None:
        super().set_loss_scaler(scaler)
        self.optimizer.skip_on_overflow = True

    def zero_grad(  # type: ignore[override]
        self, set_grads_to_None: bool = True, set_to_none: bool | None = None
    ) -> None:
        super().zero_grad(set_grads_to_None, set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        own_step = getattr(getattr(self.optimizer, "_original_class", None), "step", None)
        takes_norms = own_step and "grad_norms" in inspect.signature(own_step).parameters
        if closure or not takes_norms or self._skip_next:
            return super().step(closure)
        grads = [[p.grad for p in group if p.grad is not None] for group in self.fp32_groups]
        return self.optimizer.step(grad_norms=list(map(get_total_norm, grads)))

    cur_scale = fp16_utils.FP16_Optimizer.loss_scale

    @property
    def fp32_groups(self) -> list[list[Tensor]]:
        return [group["params"] for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The keys that this class had; ``fp32_groups`` are all that is stepped."""
        return {
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "cur_scale": self.cur_scale,
            "cur_iter": self.loss_scaler._unskipped,  # since an overflow before the first
            "last_overflow_iter": -1,
            "scale_factor": self.loss_scaler._scale_factor,
            "scale_window": self.loss_scaler._scale_seq_len,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_groups": [[p.detach() for p in group] for group in self.fp32_groups],
        }
