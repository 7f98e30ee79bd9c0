"""LARC's ratios, as an optimizer that steps under it sees them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ampfuse import _core


@dataclasses.dataclass(frozen=True)
class Layerwise:
    """LARC's settings, as an optimizer that steps under it sees them."""

    trust_coefficient: float
    clip: bool
    eps: float

    @property
    def hyper(self) -> dict[str, Any]:
        """For ``ParamTable.set_hyper``."""
        return {
            "layerwise": True,
            "clipped_ratio": self.clip,
            "trust_coefficient": self.trust_coefficient,
            "trust_eps": self.eps,
        }

    @contextlib.contextmanager
    def rescaled(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Rescale the gradients; within, `optimizer` steps without weight decay of its own."""
        for group in optimizer.param_groups:
            self._rescale(group)
        decays = [group.get("weight_decay") for group in optimizer.param_groups]
        try:
            for group in optimizer.param_groups:
                if "weight_decay" in group:
                    group["weight_decay"] = 0.0
            yield
        finally:
            for group, decay in zip(optimizer.param_groups, decays, strict=True):
                if decay is not None:
                    group["weight_decay"] = decay

    @torch.no_grad()
    def _rescale(self, group: dict[str, Any]) -> None:
        by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]]
        by_device = defaultdict(lambda: ([], []))
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if grad.layout == torch.strided and grad.stride() != param.stride():
                grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
                param.grad = grad
            grads, params = by_device[param.device]
            grads.append(grad)
            params.append(param)
        lr = group["lr"]
        decay = float(group.get("weight_decay", 0.0))
        for device, (grads, params) in by_device.items():
            tensor = None
            if isinstance(lr, Tensor):
                tensor = lr.to(device, torch.float32)
            number = 0.0 if tensor is not None else float(lr)
            _core.C.layerwise(
                grads, params, number, tensor, decay, self.trust_coefficient, self.eps, self.clip
            )
