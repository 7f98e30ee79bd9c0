"""``FP16_Optimizer`` of ``apex.optimizers`` in 2018, of ``apex.contrib.optimizers`` since."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampfuse.compat.apex import fp16_utils
from ampfuse.compat.apex.amp.scaler import LossScaler


class FP16_Optimizer(fp16_utils.FP16_Optimizer):
    """:class:`apex.fp16_utils.FP16_Optimizer` with other defaults, around any optimizer.

    A dynamic scale, ``cur_scale``, grows after 1000 clean passes and stays above 1. An overflow of
    a static one skips the step too. ``zero_grad`` drops gradients. A user-defined step that takes
    ``grad_norms``, as that of 2019's FusedAdam does, gets the norm of each group.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
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
        if closure or not takes_norms or self._overflow is True:
            return super().step(closure)
        grads = [[p.grad for p in group if p.grad is not None] for group in self.fp32_groups]
        return self.optimizer.step(grad_norms=list(map(torch.nn.utils.get_total_norm, grads)))

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
            "scale_factor": 2.0,
            "scale_window": self.loss_scaler._scale_seq_len,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_groups": [[p.detach() for p in group] for group in self.fp32_groups],
        }
