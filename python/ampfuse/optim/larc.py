"""LARC: layer-wise learning rates around any optimizer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ampfuse import _core
from ampfuse.optim.base import AmpOptimizer, handles_loss_scaling


def _of_optim(name: str) -> Any:
    """A method of torch's optimizers that LARC delegates to the wrapped optimizer."""

    @functools.wraps(getattr(torch.optim.Optimizer, name), updated=())
    def method(self: LARC, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.optim, name)(*args, **kwargs)

    return method


class LARC(torch.optim.Optimizer):
    """Wraps an optimizer and scales the step of each tensor by a ratio of its norms.

    You, Gitman and Ginsburg, arXiv:1708.03888. For each parameter p with gradient g ::

        ratio = trust_coefficient * |p| / (|g| + weight_decay * |p| + eps)
        ratio = min(ratio / lr, 1)                    # with clip
        g = ratio * (g + weight_decay * p)

    and the optimizer steps with that g and no weight decay of its own. Where a norm is zero, as
    that of a new bias is, the gradient does not change. ::

        optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    Groups, state and everything else are those of the wrapped optimizer (``larc.optim``), so
    learning-rate schedulers take either. Around SGD, Adam, AdamW and Adagrad of ``ampfuse.optim``
    (and torch's under amp) the ratio is part of the fused step, and gradients are not rewritten;
    clipping (``max_grad_norm``) comes first. For any other optimizer one fused operation rewrites
    the gradients, as in NVIDIA apex, whose constructor this is.

    Arguments:
        optimizer: any ``torch.optim.Optimizer`` whose groups have ``lr``.
        trust_coefficient, eps: as above.
        clip: the learning rate is an upper limit (LARC); False: a factor (LARS).

    Raises:
        TypeError: `optimizer` is not an optimizer.
        ValueError: it is LAMB or NovoGrad, which already use the norm of each tensor.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trust_coefficient: float = 0.02,
        clip: bool = True,
        eps: float = 1e-8,
    ) -> None:
        # Not torch's __init__, which would make groups and state: the wrapped optimizer has them.
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"LARC wraps an optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, AmpOptimizer) and optimizer.algorithm.follows_norms:
            raise ValueError(
                f"{type(optimizer).__name__} already scales by the norms of each tensor; use it "
                "without LARC"
            )
        self.optim, self.trust_coefficient = optimizer, trust_coefficient
        self.clip, self.eps = clip, eps

    _OWN = frozenset({"optim", "trust_coefficient", "clip", "eps", "step"})

    # Every other attribute is the wrapped optimizer's: groups, state, hooks, a scaler's flags.

    def __getattr__(self, name: str) -> Any:
        if name in LARC._OWN:  # not set yet, during a copy
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in LARC._OWN:
            self.__dict__[name] = value
        else:
            setattr(self.optim, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            del self.__dict__[name]
        else:
            delattr(self.optim, name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's step with rescaled gradients, and its return value.

        Arguments:
            closure: reevaluates the model and returns the loss; it is called once, before the
                gradients are rescaled.
        """
        settings = Layerwise(float(self.trust_coefficient), bool(self.clip), float(self.eps))
        optimizer = self.optim
        if handles_loss_scaling(optimizer):
            optimizer._layerwise = settings
            try:
                return optimizer.step(closure)
            finally:
                optimizer._layerwise = None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with settings.rescaled(optimizer):
            result = optimizer.step()
        return loss if closure is not None else result

    zero_grad, state_dict = _of_optim("zero_grad"), _of_optim("state_dict")
    load_state_dict, add_param_group = _of_optim("load_state_dict"), _of_optim("add_param_group")

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in LARC._OWN - {"step"}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


@dataclasses.dataclass(frozen=True)
class Layerwise:
    """LARC's settings, by their names in the kernels."""

    trust_coefficient: float
    clipped_ratio: bool
    trust_eps: float

    @contextlib.contextmanager
    def rescaled(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Rescale the gradients; within, `optimizer` steps without weight decay of its own."""
        groups = optimizer.param_groups
        decays = [(group, group["weight_decay"]) for group in groups if "weight_decay" in group]
        try:
            for group in groups:
                self._rescale(group)
            for group, _ in decays:
                group["weight_decay"] = 0.0
            yield
        finally:
            for group, decay in decays:
                group["weight_decay"] = decay

    @torch.no_grad()
    def _rescale(self, group: dict[str, Any]) -> None:
        by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if grad.layout == torch.strided and grad.stride() != param.stride():
                grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
                param.grad = grad
            by_device[param.device].append((grad, param))
        lr, decay = group["lr"], float(group.get("weight_decay", 0.0))
        for device, pairs in by_device.items():
            grads, params = zip(*pairs, strict=True)
            tensor = lr.to(device, torch.float32) if isinstance(lr, Tensor) else None
            number = 0.0 if tensor is not None else float(lr)
            values = dict(dataclasses.asdict(self), layerwise=1, lr=number, weight_decay=decay)
            steps = torch.zeros(len(grads), device=device)  # the kernels count, for nobody
            _core.C.step(
                "layerwise", grads, params, [], [], grads,
                steps, None, tensor, values, None, None,
            )  # fmt: skip
