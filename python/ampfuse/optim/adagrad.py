"""Adagrad with a fused step."""

from __future__ import annotations

from typing import Any

import torch

from ampfuse.optim.fused import FusedOptimizer


class Adagrad(FusedOptimizer, torch.optim.Adagrad):
    """Adagrad with a fused step: a drop-in for :class:`torch.optim.Adagrad`.

    Duchi, Hazan and Singer, JMLR 12, 2011. The formula and the state (``step``, ``sum``) are
    torch's, computed in FP32; state dicts load both ways.

    Arguments:
        params, lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize: as in torch.
        decoupled_weight_decay (in a parameter group only): the decay acts on the parameter, as in
            AdamW, instead of through the gradient.
        master_weights, max_grad_norm, skip_nonfinite, unscale_grads, foreach, fused: as in
            :class:`ampfuse.optim.AdamW`.

    Raises:
        TypeError: a parameter of another dtype than float32, float16 and bfloat16. ValueError: an
            argument out of range, or ``differentiable=True``.
    """

    _algorithm = "adagrad"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # torch fills the sums here (before 2.14 or so), those of half parameters in half.
        for state in self.state.values():
            if state["sum"].dtype != torch.float32:
                state["sum"] = torch.full_like(
                    state["sum"], self._initial_state, dtype=torch.float32
                )

    @property
    def _initial_state(self) -> float:
        return float(self.defaults["initial_accumulator_value"])

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("sum",)

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "lr": group["lr"],
            "lr_decay": float(group["lr_decay"]),
            "weight_decay": float(group["weight_decay"]),
            "eps": float(group["eps"]),
            "maximize": bool(group["maximize"]),
            "decoupled": bool(group.get("decoupled_weight_decay", False)),
        }
