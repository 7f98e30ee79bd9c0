"""Ways to the same step: ampfuse, and what torch offers.

Each route is built from the same model weights and holds, as its user would, half (or FP32)
parameters with scaled gradients. ``route()`` takes one whole step: unscale, check for overflow,
clip, update, and the model weights in their own precision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ampfuse

# torch.compile reports what it leaves out of an optimizer's graph: nothing that computes.
torch._logging.set_logs(all=logging.ERROR)

SCALE = 1024.0
MAX_NORM = 1.0
# The scale stays; the change of the scale is not what is measured.
_SCALER_OPTIONS = {"init_scale": SCALE, "growth_interval": 2**30}
OPTIONS = {
    "AdamW": {"lr": 1e-3, "weight_decay": 1e-2},
    "SGD": {"lr": 1e-3, "weight_decay": 1e-2, "momentum": 0.9},
}


def _parameters(weights: list[Tensor], gradients: list[Tensor]) -> list[torch.nn.Parameter]:
    """Parameters of their own; the gradients are shared, and no route may write half ones."""
    params = [torch.nn.Parameter(w.clone()) for w in weights]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient
    return params


class Ours:
    """ampfuse's optimizer and scaler."""

    def __init__(self, name: str, weights: list[Tensor], gradients: list[Tensor]) -> None:
        self.params = _parameters(weights, gradients)
        self.optimizer = getattr(ampfuse.optim, name)(
            self.params,
            master_weights=weights[0].dtype != torch.float32,
            max_grad_norm=MAX_NORM,
            **OPTIONS[name],
        )
        self.scaler = ampfuse.GradScaler(weights[0].device.type, **_SCALER_OPTIONS)
        self.scaler.scale(torch.ones((), device=weights[0].device))

    def __call__(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class TorchMasters:
    """torch's optimizer on FP32 masters (the parameters themselves, if they are FP32).

    Gradients are copied into the masters', unscaled there by ``torch.amp.GradScaler`` and clipped
    by ``torch.nn.utils.clip_grad_norm_``; the masters are copied back.
    """

    def __init__(
        self,
        optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
        weights: list[Tensor],
        gradients: list[Tensor],
        compiled: bool = False,
    ) -> None:
        self.params = _parameters(weights, gradients)
        self.gradients = gradients
        self.masters = self.params
        if weights[0].dtype != torch.float32:
            self.masters = [torch.nn.Parameter(p.detach().float()) for p in self.params]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer = optimizer(self.masters)
        if compiled:
            self.optimizer.step = torch.compile(self.optimizer.step)
        self.scaler = torch.amp.GradScaler(weights[0].device.type, **_SCALER_OPTIONS)
        self.scaler.scale(torch.ones((), device=weights[0].device))

    def prepare(self) -> None:
        """What a backward pass would do: new gradients, where the last step rewrote them."""
        if self.masters is self.params:
            self._copy_gradients()

    @torch.no_grad()
    def __call__(self) -> None:
        if self.masters is not self.params:
            self._copy_gradients()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.masters, MAX_NORM, foreach=True)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.masters is not self.params:
            torch._foreach_copy_(self.params, self.masters)

    def _copy_gradients(self) -> None:
        torch._foreach_copy_([master.grad for master in self.masters], self.gradients)


def peers(name: str, many: bool) -> dict[str, Callable[[list[Tensor], list[Tensor]], Any]]:
    """The peers for ``torch.optim.<name>``, by what their rows are called.

    Arguments:
        many: of tensors, thousands; torch.compile then takes many minutes and is left out.
    """
    kind, options = getattr(torch.optim, name), OPTIONS[name]

    def torch_route(compiled: bool = False, **more: Any) -> Callable[..., TorchMasters]:
        def make(params: list[Tensor]) -> torch.optim.Optimizer:
            return kind(params, **{**options, **more})

        return lambda weights, gradients: TorchMasters(make, weights, gradients, compiled)

    routes = {
        "torch fused": torch_route(fused=True),
        "torch foreach": torch_route(foreach=True),
    }
    if not many:
        # A tensor lr, so that a schedule would not compile again.
        lr = {} if name == "SGD" else {"lr": torch.tensor(options["lr"])}
        routes["torch compiled"] = torch_route(compiled=True, **lr)
    if name == "AdamW":
        try:
            from deepspeed.ops.adam import DeepSpeedCPUAdam
        except ImportError:
            pass
        else:
            routes["DeepSpeed CPUAdam"] = lambda weights, gradients: TorchMasters(
                lambda params: DeepSpeedCPUAdam(params, adamw_mode=True, **options),
                weights,
                gradients,
            )
    return routes
