"""``apex.optimizers.FusedAdagrad`` on :class:`ampfuse.optim.Adagrad`."""

from __future__ import annotations

from typing import Any

import torch

from ampfuse.compat.apex import amp_C
from ampfuse.compat.apex.optimizers.common import ApexOptimizer, of_groups
from ampfuse.optim import Adagrad


class FusedAdagrad(ApexOptimizer, Adagrad):
    """:class:`ampfuse.optim.Adagrad` with apex's arguments.

    Arguments:
        lr, eps, weight_decay: as in torch.
        set_grad_none: whether ``zero_grad()`` drops gradients by default, or zeroes them.
        adagrad_w_mode: decoupled weight decay instead of L2 through the gradient.
    """

    _counts_steps = False
    multi_tensor_adagrad = staticmethod(amp_C.multi_tensor_adagrad)
    adagrad_w_mode = of_groups("decoupled_weight_decay", int)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.construct(locals(), "decoupled_weight_decay")

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = False) -> None:
        """Loads apex's, torch's and ampfuse's state dicts; apex counted no steps."""
        count = {"step": torch.zeros(())}
        state = {k: {**count, **v} if "sum" in v else v for k, v in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": state}, strict=strict)
