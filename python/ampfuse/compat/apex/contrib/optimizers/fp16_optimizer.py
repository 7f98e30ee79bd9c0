"""``apex.contrib.optimizers.FP16_Optimizer``, around any optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampfuse.compat.apex import fp16_utils
from ampfuse.compat.apex.amp.scaler import LossScaler


class FP16_Optimizer(fp16_utils.FP16_Optimizer):
    """:class:`apex.fp16_utils.FP16_Optimizer` with contrib's defaults.

    A dynamic scale grows after 1000 clean passes and stays above 1. An overflow of a static one
    skips the step too. ``zero_grad`` drops gradients.

    Attributes:
        cur_scale: the loss scale.
        fp32_groups: what is stepped, as lists.
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

    cur_scale = fp16_utils.FP16_Optimizer.loss_scale

    @property
    def fp32_groups(self) -> list[list[Tensor]]:
        return [group["params"] for group in self.param_groups]
