"""Ways to the same step: ampfuse, what torch offers, and other libraries.

Each route is built from the same model weights and holds, as its user would, half (or FP32)
parameters with scaled gradients. ``route()`` takes one whole step: unscale, check for overflow,
clip, update, and the model weights in their own precision (less of it where the case says so).

A route has ``params``, the model weights; ``bytes_per_param``, what its passes read and write per
parameter, NaN if that is not known; and maybe ``prepare()``, what a backward pass would do before
the next step, which is not measured.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from workloads import Case

import ampfuse
from ampfuse.amp.casts import cast_own_parameters

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


def _parameters(weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Parameters of their own; the gradients are shared, and no route may write half ones."""
    params: list[Tensor] = [torch.nn.Parameter(w.clone()) for w in weights]
    _set_gradients(params, gradients)
    return params


def _set_gradients(params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient


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
    "split bf16": ({"master_weights": "split", "state_dtype": "bf16"}, 20),
    "ema": ({"ema_decay": 0.999}, 38),
}


class Ours:
    """ampfuse's optimizer and scaler; half weights are cast as ``amp.initialize`` does it.

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
        self.case, self.gradients = case, gradients
        copies = [w.to(torch.float32, copy=True) for w in weights]
        model = torch.nn.ParameterList(map(torch.nn.Parameter, copies))
        cast_own_parameters(model, case.dtype)
        self.params = list(model)
        if case.rewrites:
            gradients = [gradient.clone() for gradient in gradients]
        _set_gradients(self.params, gradients)
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

    def set_gradients(self, gradients: Sequence[Tensor]) -> None:
        _set_gradients(self.params, gradients)

    @torch.no_grad()
    def prepare(self) -> None:
        """New gradients, where the last step rewrote them."""
        if self.case.rewrites:
            torch._foreach_copy_([param.grad for param in self.params], self.gradients)

    def __call__(self) -> None:
        if self.case.scaled:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()


class OnMasters:
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
        """Other tensors with the gradients, as after ``zero_grad`` and a backward pass."""
        self.gradients = list(gradients)
        if self.case.half:
            _set_gradients(self.params, gradients)
        else:
            for master, gradient in zip(self.masters, gradients, strict=True):
                master.grad = gradient.float().clone()

    def prepare(self) -> None:
        """New gradients, where the last step rewrote them."""
        if not self.case.half:
            self._copy_gradients()

    @torch.no_grad()
    def __call__(self) -> None:
        if self.case.half:
            self._copy_gradients()
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

    @torch.no_grad()
    def _copy_gradients(self) -> None:
        torch._foreach_copy_([master.grad for master in self.masters], self.gradients)


class OnHalf:
    """An optimizer that keeps what it needs beside half parameters (or steps FP32 ones).

    ``clip_grad_norm_`` has to clip half gradients as they are, scaled: to the scaled norm. An
    optimizer that no scaler can drive is given gradients without a scale: less work than ours.
    """

    bytes_per_param = math.nan

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
        build: makes the route of case, weights and gradients; ImportError: it is not installed.
        package: the distribution whose version counts; "" for torch itself.
        agrees: arrives at ampfuse's weights (an optimizer with 8-bit moments does not).
    """

    build: Callable[[Case, Sequence[Tensor], Sequence[Tensor]], Any]
    package: str = ""
    agrees: bool = True

    @property
    def version(self) -> str:
        """Name and version of the package, if it is not torch."""
        if not self.package:
            return ""
        try:
            return f"{self.package} {importlib.metadata.version(self.package)}"
        except importlib.metadata.PackageNotFoundError:
            return self.package


# Tensors (or groups). torch.compile takes seconds for each on a CPU, a fraction of one on a GPU.
_COMPILED_AT_MOST = {"cpu": 50, "cuda": 300}


def peers(case: Case, device: torch.device, compiled: bool = True) -> dict[str, Peer]:
    """The peers of a case, installed or not, by what their rows are called.

    `compiled`: also what torch.compile makes, where that is a matter of seconds.
    """
    routes: dict[str, Peer] = {}
    if case.optimizer in ("AdamW", "SGD"):
        routes["torch fused"] = _torch(case, device, "fused")
        routes["torch foreach"] = _torch(case, device, "foreach")
        few = len(case.sizes) <= _COMPILED_AT_MOST[device.type] and not case.grouped
        if compiled and few:
            routes["torch compiled"] = _torch(case, device, "compiled")
    elif case.optimizer == "LAMB":
        routes["timm Lamb"] = Peer(_timm_lamb, "timm")
    if case.optimizer == "AdamW" and device.type == "cpu":
        routes["DeepSpeed CPUAdam"] = Peer(_deepspeed, "deepspeed")
    if case.optimizer == "AdamW" and device.type == "cuda":
        routes["apex FusedAdam"] = Peer(_apex, "apex")
        routes["TransformerEngine FusedAdam"] = Peer(_transformer_engine, "transformer_engine")
        routes["flashoptim FlashAdamW"] = Peer(_flashoptim, "flashoptim", agrees=False)
        routes["bitsandbytes AdamW8bit"] = Peer(_bitsandbytes, "bitsandbytes", agrees=False)
    return routes


def _torch(case: Case, device: torch.device, update: str) -> Peer:
    options: dict[str, Any] = dict(OPTIONS[case.optimizer])
    if update != "compiled":
        options[update] = True
    elif case.optimizer == "AdamW":
        # A tensor, so that a schedule would not compile again. On a GPU the multi-tensor path,
        # which is the one that compiles into few kernels, takes one only with capturable.
        options["lr"] = torch.tensor(options["lr"], device=device)
        if device.type == "cuda":
            options |= {"foreach": True, "capturable": True}

    def build(case: Case, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> OnMasters:
        def make(params: list[Any]) -> torch.optim.Optimizer:
            return getattr(torch.optim, case.optimizer)(params, **options)

        return OnMasters(case, weights, gradients, make, update)

    return Peer(build)


def _timm_lamb(case: Case, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> OnMasters:
    from timm.optim import Lamb

    def make(params: list[Any]) -> torch.optim.Optimizer:
        return Lamb(params, max_grad_norm=None, **OPTIONS["LAMB"])

    return OnMasters(case, weights, gradients, make, math.nan)


def _deepspeed(case: Case, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> OnMasters:
    """Compiled at its first use; step.py says what that needs."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    def make(params: list[Any]) -> torch.optim.Optimizer:
        return DeepSpeedCPUAdam(params, adamw_mode=True, **OPTIONS["AdamW"])

    return OnMasters(case, weights, gradients, make, 28)


def _apex(case: Case, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> OnHalf:
    from apex.optimizers import FusedAdam

    if FusedAdam.__module__.startswith("ampfuse"):
        raise ImportError("apex is ampfuse.compat.apex here")
    if case.precision == "bf16":
        raise NotImplementedError("apex has no masters for BF16 parameters")

    def make(params: list[Any]) -> torch.optim.Optimizer:
        return FusedAdam(
            params,
            adam_w_mode=True,
            capturable=case.scaled or case.half,
            master_weights=case.half,
            **OPTIONS["AdamW"],
        )

    return OnHalf(case, weights, gradients, make)


def _transformer_engine(
    case: Case, weights: Sequence[Tensor], gradients: Sequence[Tensor]
) -> OnHalf:
    from transformer_engine.pytorch.optimizers import FusedAdam

    def make(params: list[Any]) -> torch.optim.Optimizer:
        return FusedAdam(
            params,
            adam_w_mode=True,
            capturable=case.scaled,
            master_weights=case.half,
            **OPTIONS["AdamW"],
        )

    return OnHalf(case, weights, gradients, make)


def _flashoptim(case: Case, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> OnHalf:
    from flashoptim import FlashAdamW

    return OnHalf(case, weights, gradients, lambda params: FlashAdamW(params, **OPTIONS["AdamW"]))


def _bitsandbytes(case: Case, weights: Sequence[Tensor], gradients: Sequence[Tensor]) -> OnHalf:
    from bitsandbytes.optim import AdamW8bit

    return OnHalf(case, weights, gradients, lambda params: AdamW8bit(params, **OPTIONS["AdamW"]))
