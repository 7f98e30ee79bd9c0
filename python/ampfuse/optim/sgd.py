"""SGD with a fused step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampfuse.optim.fused import FusedOptimizer
from ampfuse.optim.kept import STATES, Kept
from ampfuse.optim.options import Options, Unpack


class SGD(FusedOptimizer, torch.optim.SGD, replaces=torch.optim.SGD):
    """SGD with momentum and a fused step: a drop-in for :class:`torch.optim.SGD`.

    The formula and the state (``momentum_buffer``) are torch's, computed in FP32; state dicts load
    both ways. As in torch, a parameter's buffer starts as its first gradient.

    Arguments:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.
        wd_after_momentum (in a parameter group only): add the weight decay after the momentum
            instead of before it.
        foreach, fused: accepted and without effect. options: see :class:`ampfuse.optim.Options`.

    Raises:
        TypeError: a parameter of another dtype than float32, float16 and bfloat16. ValueError: an
            argument out of range, or ``differentiable=True``.
    """

    _algorithm = "sgd"
    _may_lack = ("step", "momentum_buffer")

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
        self._set_options(options, locals())
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return STATES[self._algorithm] if group["momentum"] != 0 else ()

    def _hyper(self, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "lr": group["lr"],
            "weight_decay": float(group["weight_decay"]),
            "momentum": float(group["momentum"]),
            "dampening": float(group["dampening"]),
            "maximize": bool(group["maximize"]),
            "nesterov": bool(group["nesterov"]),
            "late_decay": bool(group.get("wd_after_momentum", False)),
        }

    # torch's SGD keeps no step count: a buffer that exists has been started. Ours is a device
    # column, so a buffer that exists may still wait for its first applied step. It is in the state
    # where random bits depend on it.

    # (state, row) of the buffers that the table works on, and its step counts.
    _buffers: list[tuple[dict[str, Any], int]] = []  # noqa: RUF012, replaced when bound
    _counts: Tensor
    _buffer = Kept("sgd", 0, "momentum_buffer")

    def _bind_columns(self, state: dict[str, Any], row: int) -> None:
        group = self._group_of(row)
        if self.rounding == "stochastic" or self._mode_of(group) == "bf16":
            super()._bind_columns(state, row)
        else:
            state.pop("step", None)
        if self._buffer.mode_in(state) is not None:
            self._buffers.append((state, row))

    def _saved_number(self, state: dict[str, Any], row: int, name: str) -> Any:
        has_buffer = self._buffer.mode_in(state) is not None
        starts = self._state_names(self._group_of(row)) and not has_buffer
        return 0 if starts else super()._saved_number({"step": int(has_buffer), **state}, row, name)

    def _bind_states(self) -> None:
        self._keep_unstarted()
        self._buffers = []
        super()._bind_states()
        self._counts = self._known_table().steps()

    def state_dict(self) -> dict[str, Any]:
        self._keep_unstarted()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        self._keep_unstarted()
        return super().__getstate__()

    def _keep_unstarted(self) -> None:
        """Write None for buffers whose first step was skipped, as torch would have them."""
        counts = self._counts.tolist() if self._buffers else []
        for state, row in self._buffers:
            if counts[row] == 0 and self._buffer.mode_in(state) is not None:
                for key in self._buffer.keys:
                    state.pop(key, None)
                state["momentum_buffer"] = None
                self._states_bound = False
