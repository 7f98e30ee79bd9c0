"""Ways to the same step: ampfuse, what torch offers, and other libraries.

Each route is built from the same model weights and holds, as its user would, half (or FP32)
parameters with scaled gradients. ``route()`` takes one whole step: unscale, check for overflow,
clip, update, and the model weights in their own precision (less of it where the case says so).

A route has ``params``, the model weights; ``bytes_per_param``, what its passes read and write per
parameter, NaN if that is not known; and ``prepare()``, what a backward pass would do before the
next step, which is not measured.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .cases import Case

# torch.compile reports what it leaves out of an optimizer's graph: nothing that computes.
torch._logging.set_logs(all=logging.ERROR)

SCALE = 1024.0
MAX_NORM = 1.0
# The scale stays; the change of the scale is not what is measured.
_SCALER_OPTIONS = {"init_scale": SCALE, "growth_interval": 2**30}
OPTIONS: dict[str, dict[str, float]] = {
    "AdamW": {"lr": 1e-3, "weight_decay": 1e-2},
    "LAMB": {"lr": 1e-3, "weight_decay": 1e-2},
    "SGD": {"lr": 1e-3, "weight_decay": 1e-2, "momentum": 0.9},
}
# Read and written per parameter by torch's FP32 update. Fused and compiled ones hold all in
# registers: gradient once, weight and moments twice. Each foreach operation is a pass of its own.
_UPDATE_BYTES = {
    ("AdamW", "fused"): 28,
    ("AdamW", "compiled"): 28,
    # mul p, lerp m g, mul v, addcmul v g, sqrt v, div, add, addcdiv p m
    ("AdamW", "foreach"): 8 + 12 + 8 + 12 + 8 + 8 + 8 + 16,
    ("SGD", "fused"): 20,
    ("SGD", "compiled"): 20,
    # add g p, mul m, add m g, add p m
    ("SGD", "foreach"): 12 + 8 + 12 + 12,
}

Make = Callable[[list[Any]], torch.optim.Optimizer]


@lru_cache(maxsize=1)  # all routes of a case share them
def tensors_of(case: Case, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Model weights, and gradients that carry the scale if the case has one."""
    random = torch.Generator(device).manual_seed(0)

    def normal(size: int, deviation: float) -> Tensor:
        values = torch.randn(size, generator=random, device=device)
        return values.mul_(deviation).to(case.dtype)

    scale = SCALE if case.scaled else 1.0
    weights, gradients = (
        [normal(size, deviation) for size in case.sizes] for deviation in (0.02, 1e-3 * scale)
    )
    if case.tensors.endswith("seldom"):
        for gradient in gradients:
            gradient.view(5, -1)[1:] = 0
    if case.tensors.endswith("odd"):
        bucket = torch.cat([gradients[0][:1], *gradients])
        gradients = list(bucket[1:].split(case.sizes))
    return weights, gradients


class Route:
    """What all routes have."""

    case: Case
    params: Sequence[Tensor]
    gradients: Sequence[Tensor]
    bytes_per_param = math.nan

    def prepare(self) -> None:
        pass

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Other tensors with the gradients, as after ``zero_grad`` and a backward pass."""
        _set_gradients(self.params, gradients)

    def answer(self) -> tuple[float, list[list[float]]]:
        """`bytes_per_param`, and a part of the weights, as it fits through a pipe."""
        stride = 1 + self.case.params // 2**18
        return self.bytes_per_param, [p.detach()[::stride].tolist() for p in self.params]


class NewGradients:
    """A route whose gradients are other tensors before each call."""

    def __init__(self, route: Route) -> None:
        self.route, self.gradients = route, route.gradients

    def prepare(self) -> None:
        self.route.set_gradients([gradient.clone() for gradient in self.gradients])

    def __call__(self) -> None:
        self.route()


def _parameters(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Parameters of their own; the gradients are shared, and no route may write half ones."""
    params: list[Tensor] = [torch.nn.Parameter(w.clone()) for w in weights]
    _set_gradients(params, gradients)
    return params


def _set_gradients(params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient


def _copy_gradients(params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    targets = [param.grad for param in params]
    if isinstance(targets[0], DTensor):
        targets, gradients = ([t.to_local() for t in some] for some in (targets, gradients))
    torch._foreach_copy_(targets, gradients)


def _groups(case: Case, params: Sequence[Tensor]) -> list[Any]:
    return [{"params": [param]} for param in params] if case.grouped else list(params)


def _scaler(kind: type, device: torch.device) -> Any:
    scaler = kind(device.type, **_SCALER_OPTIONS)
    scaler.scale(torch.ones((), device=device))  # as of a loss: makes the scale on the device
    return scaler


# Of AdamW with half weights: each memory mode's options, and the bytes that its step reads and
# writes per parameter. A block's two scales of 4 bytes are read and written for 128 elements.
_SCALES = 2 * 8 / 128
MODES: dict[str, tuple[dict[str, Any], float]] = {
    "split": ({"master_weights": "split"}, 28),
    "8bit": ({"state_dtype": "8bit"}, 18 + _SCALES),
    "split 8bit": ({"master_weights": "split", "state_dtype": "8bit"}, 16 + _SCALES),
    "split fp8": ({"master_weights": "split", "state_dtype": "fp8"}, 16 + _SCALES),
    "split bf16": ({"master_weights": "split", "state_dtype": "bf16"}, 20),
    "ema": ({"ema_decay": 0.999}, 38),
}


class Ours(Route):
    """ampfuse's optimizer and scaler.

    Arguments:
        mode: one of `MODES`; None: FP32 masters and states.
    """

    def __init__(
        self,
        case: Case,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        mode: str | None = None,
    ) -> None:
        import ampfuse

        self.case, self.gradients = case, gradients
        if case.rewrites:
            gradients = [gradient.clone() for gradient in gradients]
        self.params = _parameters(weights, gradients)
        options, step_bytes = MODES[mode] if mode else ({}, case.step_bytes)
        self.optimizer = getattr(ampfuse.optim, case.optimizer)(
            _groups(case, self.params),
            max_grad_norm=MAX_NORM if case.clip else None,
            unscale_grads=case.does != "leave",
            **{"master_weights": case.half, **options},
            **OPTIONS[case.optimizer],
        )
        self.scaler = _scaler(ampfuse.GradScaler, weights[0].device)
        self.bytes_per_param = float(step_bytes)

    @torch.no_grad()
    def prepare(self) -> None:
        """New gradients, where the last step rewrote them."""
        if self.case.rewrites:
            _copy_gradients(self.params, self.gradients)

    def __call__(self) -> None:
        if self.case.scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()


class OnMasters(Route):
    """An optimizer on FP32 masters, with what torch has around it.

    - FP32 case: the parameters are stepped themselves.
    - Half case: half gradients are copied into the masters', and the masters into half weights. A
      hand-made O2 does so, and ``torch.amp`` too: FP32 parameters are its masters, autograd casts
      the gradient of each half weight to FP32, and autocast casts the weights again.

    Gradients are unscaled by ``torch.amp.GradScaler`` and clipped by
    ``torch.nn.utils.clip_grad_norm_``.

    Arguments:
        make: the optimizer, of parameters or groups.
        update: "fused", "foreach" or "compiled" of ``torch.optim``, for `bytes_per_param`; or the
            bytes per parameter of another update.
    """

    def __init__(
        self,
        case: Case,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        make: Make,
        update: str | float,
    ) -> None:
        self.case, self.gradients = case, list(gradients)
        self.params = _parameters(weights, gradients)
        self.masters = self.params
        if case.half:
            self.masters = [torch.nn.Parameter(p.detach().float()) for p in self.params]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.optimizer = make(_groups(case, self.masters))
        if update == "compiled":
            self.optimizer.step = torch.compile(self.optimizer.step)
        self.scaler = _scaler(torch.amp.GradScaler, weights[0].device)
        self.bytes_per_param = self._count_bytes(update)

    def _count_bytes(self, update: str | float) -> float:
        case, h = self.case, self.case.dtype.itemsize
        known = isinstance(update, str)
        total = float(_UPDATE_BYTES[case.optimizer, update] if known else update)
        if case.scaled:
            total += 8  # unscaled, or just checked: every gradient is read and written
            if update == "fused" and not case.clip:
                total += 4  # what was just checked is unscaled, and written, by the update
        if case.clip:
            total += 4 + 8  # measured; multiplied, also by 1
        if case.half:
            total += 2 * (h + 4)  # gradients and weights, cast
        return total

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        self.gradients = list(gradients)
        if self.case.half:
            _set_gradients(self.params, gradients)
        else:
            for master, gradient in zip(self.masters, gradients, strict=True):
                master.grad = gradient.float().clone()

    @torch.no_grad()
    def prepare(self) -> None:
        """New gradients, where the last step rewrote them."""
        if not self.case.half:
            _copy_gradients(self.masters, self.gradients)

    @torch.no_grad()
    def __call__(self) -> None:
        if self.case.half:
            _copy_gradients(self.masters, self.gradients)
        if self.case.clip:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.masters, MAX_NORM, foreach=True)
        if self.case.scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if self.case.half:
            torch._foreach_copy_(self.params, self.masters)


class OnHalf(Route):
    """An optimizer that keeps what it needs beside half parameters (or steps FP32 ones).

    ``clip_grad_norm_`` has to clip half gradients as they are, scaled: to the scaled norm. An
    optimizer that no scaler can drive is given gradients without a scale: less work than ours.
    """

    def __init__(
        self, case: Case, weights: Sequence[Tensor], gradients: Sequence[Tensor], make: Make
    ) -> None:
        self.case, self.gradients = case, gradients
        self.params = _parameters(weights, [torch.empty_like(gradient) for gradient in gradients])
        self.optimizer = make(_groups(case, self.params))
        kwargs = inspect.signature(self.optimizer.step).parameters
        takes_scale = getattr(self.optimizer, "_step_supports_amp_scaling", "grad_scaler" in kwargs)
        self.scaler = None
        if case.scaled and takes_scale:
            self.scaler = _scaler(torch.amp.GradScaler, weights[0].device)

    @torch.no_grad()
    def prepare(self) -> None:
        """New gradients: clipping rewrites them."""
        grads = [param.grad for param in self.params]
        torch._foreach_copy_(grads, self.gradients)
        if self.case.scaled and self.scaler is None:
            torch._foreach_mul_(grads, 1 / SCALE)

    @torch.no_grad()
    def __call__(self) -> None:
        scale = SCALE if self.scaler else 1.0
        if self.case.clip:
            torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM * scale, foreach=True)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()


@dataclass(frozen=True)
class Peer:
    """A route by somebody else.

    Attributes:
        optimizer: "module:class", imported where it is measured.
        options: beside `OPTIONS`; a compiled one has lr as a tensor, so that a schedule would not
            compile again.
        update: what :class:`OnMasters` takes; None: the optimizer takes half parameters.
        agrees: arrives at ampfuse's weights (an optimizer with 8-bit moments does not).
    """

    optimizer: str
    options: dict[str, Any]
    update: str | float | None = None
    agrees: bool = True

    def build(self, case: Case, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> Route:
        """Raises ImportError if the peer is not installed."""
        module, name = self.optimizer.split(":")
        kind = getattr(importlib.import_module(module), name)
        options: dict[str, Any] = OPTIONS[case.optimizer] | self.options
        if self.update == "compiled" and case.optimizer == "AdamW":
            options["lr"] = torch.tensor(options["lr"], device=weights[0].device)

        def make(params: list[Any]) -> torch.optim.Optimizer:
            return kind(params, **options)

        if self.update is None:
            return OnHalf(case, weights, gradients, make)
        return OnMasters(case, weights, gradients, make, self.update)

    @property
    def version(self) -> str:
        """Name and version of the package, if it is not torch."""
        package = self.optimizer.split(".")[0]
        if package == "torch":
            return ""
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            return package


def peer_route(case: Case, device: torch.device, peer: Peer, new_gradients: bool = False) -> Any:
    """For a worker: the peer's route after its first step, which makes the state."""
    route: Any = peer.build(case, *tensors_of(case, device))
    if new_gradients:
        route = NewGradients(route)
    route.prepare()
    route()
    return route


# Tensors (or groups). torch.compile takes seconds for each on a CPU, a fraction of one on a GPU.
_COMPILED_AT_MOST = {"cpu": 50, "cuda": 300}


def peers(case: Case, device: torch.device, compiled: bool = True) -> dict[str, Peer]:
    """The peers of a case, installed or not, by what their rows are called.

    `compiled`: also what torch.compile makes, where that is a matter of seconds.
    """
    on_gpu = device.type == "cuda"
    if case.optimizer == "LAMB":
        return {"timm Lamb": Peer("timm.optim:Lamb", {"max_grad_norm": None}, math.nan)}
    ours = f"torch.optim:{case.optimizer}"
    routes = {f"torch {way}": Peer(ours, {way: True}, way) for way in ("fused", "foreach")}
    if compiled and len(case.sizes) <= _COMPILED_AT_MOST[device.type] and not case.grouped:
        # On a GPU the multi-tensor path, which is the one that compiles into few kernels, takes a
        # tensor as lr only with capturable.
        multi = on_gpu and case.optimizer == "AdamW"
        options = {"foreach": True, "capturable": True} if multi else {}
        routes["torch compiled"] = Peer(ours, options, "compiled")
    if case.optimizer == "AdamW" and not on_gpu:
        deepspeed = "deepspeed.ops.adam:DeepSpeedCPUAdam"
        routes["DeepSpeed CPUAdam"] = Peer(deepspeed, {"adamw_mode": True}, 28)
    if case.optimizer == "AdamW" and on_gpu:
        masters = {"adam_w_mode": True, "master_weights": case.half}
        if case.precision != "bf16":  # apex has no masters for those
            capturable = {"capturable": case.scaled or case.half}
            routes["apex FusedAdam"] = Peer("apex.optimizers:FusedAdam", masters | capturable)
        engine = "transformer_engine.pytorch.optimizers:FusedAdam"
        engines = Peer(engine, masters | {"capturable": case.scaled})
        routes["TransformerEngine FusedAdam"] = engines
        routes["flashoptim FlashAdamW"] = Peer("flashoptim:FlashAdamW", {}, agrees=False)
    if case.optimizer == "AdamW":
        for package in ("bitsandbytes", "torchao"):
            routes[f"{package} AdamW8bit"] = Peer(f"{package}.optim:AdamW8bit", {}, agrees=False)
    return routes
