"""Ways to the same step: ampfuse, what torch offers, and other libraries.

Each route is built from the same model weights and holds, as its user would, half (or FP32)
parameters with scaled gradients. ``route()`` takes one whole step: unscale, check for overflow,
clip, update, and the model weights in their own precision (less of it where the case says so).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .cases import Case

# torch.compile reports what it leaves out of an optimizer's graph: nothing that computes.
torch._logging.set_logs(all=logging.ERROR)

SCALE = 1024.0
MAX_NORM = 1.0
OPTIONS: dict[str, dict[str, float]] = {
    "AdamW": {"lr": 1e-3, "weight_decay": 1e-2},
    "SGD": {"lr": 1e-3, "weight_decay": 1e-2, "momentum": 0.9},
    "Muon": {"lr": 1e-3},
}
# Of AdamW with half weights: each memory mode's options, and the bytes that its step reads and
# writes per parameter. A block's two scales of 4 bytes are read and written for 128 elements.
_SCALES = 2 * 8 / 128
MODES: dict[str, tuple[dict[str, Any], float]] = {
    "ampfuse split": ({"master_weights": "split"}, 28),
    "ampfuse 8bit": ({"state_dtype": "8bit"}, 18 + _SCALES),
    "ampfuse split 8bit": ({"master_weights": "split", "state_dtype": "8bit"}, 16 + _SCALES),
    "ampfuse split bf16": ({"master_weights": "split", "state_dtype": "bf16"}, 20),
    "ampfuse ema": ({"ema_decay": 0.999}, 38),
}
METER: dict[str, dict[str, Any]] = {
    "ampfuse, meter off": {"every": 2**30},
    "ampfuse, metered": {"every": 1},
    "ampfuse, metered, bits": {"every": 1, "changed_bits": True},
}
SKIPS: dict[str, dict[str, Any]] = {
    "ampfuse, skip_nonfinite": {"skip_nonfinite": True},
    "ampfuse, skip_spikes": {"skip_spikes": 6.0},
}


@lru_cache(maxsize=1)  # all routes of a case share them
def tensors_of(case: Case, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Model weights, and gradients that carry the scale if the case has one."""
    random = torch.Generator(device).manual_seed(0)

    def tensors(deviation: float) -> list[Tensor]:
        found = (torch.randn(shape, generator=random, device=device) for shape in case.shapes)
        return [tensor.mul_(deviation).to(case.dtype) for tensor in found]

    return tensors(0.02), tensors(1e-3 * (SCALE if case.clip else 1.0))


class Route:
    """The base of all routes; `params` are the model weights.

    Arguments:
        scaler: the class of the scaler, or None if gradients have no scale.
        rewrites: whether the step writes into the gradients, which all routes share.
    """

    def __init__(self, case: Case, device: torch.device, scaler: Any, rewrites: bool) -> None:
        self.case, self.rewrites = case, rewrites
        weights, self.gradients = tensors_of(case, device)
        self.params: list[Any] = [nn.Parameter(weight.clone()) for weight in weights]
        self._set(self.gradients if not rewrites else [g.clone() for g in self.gradients])
        # The scale stays: its change is not what is measured.
        options: dict[str, Any] = {"init_scale": SCALE, "growth_interval": 2**30}
        options["enabled"] = case.clip and scaler is not None
        self.scaler = (scaler or torch.amp.GradScaler)(device.type, **options)
        self.scaler.scale(torch.ones((), device=device))  # as of a loss: makes it on the device

    def _set(self, gradients: Sequence[Tensor]) -> None:
        for param, gradient in zip(self.params, gradients, strict=True):
            param.grad = gradient

    @torch.no_grad()
    def prepare(self) -> None:
        """Do what a backward pass would before the next step; not measured."""
        if self.case.gradients == "new":
            self._set([gradient.clone() for gradient in self.gradients])
        elif self.rewrites:
            torch._foreach_copy_([param.grad for param in self.params], self.gradients)

    def answer(self) -> list[list[float]]:
        """A part of the weights, as it fits through a pipe."""
        stride = 1 + self.case.params // 2**18
        return [param.detach().flatten()[::stride].tolist() for param in self.params]


class AmpfuseRoute(Route):
    """ampfuse's optimizer and scaler; `name` is one of `MODES`, `METER` or `SKIPS`, or has FP32
    masters and states. Its passes read and write `bytes_per_param`."""

    def __init__(self, case: Case, device: torch.device, name: str = "ampfuse") -> None:
        import ampfuse

        super().__init__(case, device, ampfuse.GradScaler, case.rewrites)
        options, step_bytes = MODES.get(name, ({}, case.step_bytes))
        params = self.params
        if case.optimizer == "Muon":
            flat = [param for param in params if param.ndim < 2]
            matrices = [param for param in params if param.ndim > 1]
            params = [{"params": matrices}, {"params": flat, "algorithm": "adamw"}]
        options = {"master_weights": case.half, **options, **OPTIONS[case.optimizer]}
        options |= {"max_grad_norm": MAX_NORM} if case.clip else {"skip_nonfinite": False}
        options |= SKIPS.get(name, {})
        self.optimizer = getattr(ampfuse.optim, case.optimizer)(params, **options)
        if name in METER:
            self.optimizer.meter(history=1, **METER[name])
        self.bytes_per_param = float(step_bytes)
        if name in SKIPS and not case.clip:  # reads the gradients before the update
            self.bytes_per_param += case.dtype.itemsize

    def __call__(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


def _muon_and_adamw(masters: list[Any]) -> list[torch.optim.Optimizer]:
    """Torch's Muon takes matrices alone, so it gets views of convolutions."""
    matrices = []
    for master in (master for master in masters if master.ndim > 1):
        matrices.append(nn.Parameter(master.detach().flatten(1)))
        matrices[-1].grad = master.grad.flatten(1)
    flat = [master for master in masters if master.ndim < 2]
    options = OPTIONS["Muon"]
    return [torch.optim.Muon(matrices, **options), torch.optim.AdamW(flat, fused=True, **options)]


@dataclass(frozen=True)
class Peer:
    """Optimizers of another library.

    Attributes:
        optimizer: "module:class", imported where it is measured.
        options: in addition to `OPTIONS`.
        on_half: they step half parameters. They get gradients without a scale, which is less work
            than ours.
        compiled: by torch.compile; lr is a tensor, so that a schedule would not compile again.
        agrees: whether it arrives at ampfuse's weights (8-bit moments do not).
    """

    optimizer: str
    options: dict[str, Any] = field(default_factory=dict)
    on_half: bool = False
    compiled: bool = False
    agrees: bool = True

    def make(self, case: Case, params: list[Any]) -> list[torch.optim.Optimizer]:
        """Raises ImportError if the peer is not installed."""
        if case.optimizer == "Muon":
            return _muon_and_adamw(params)
        module, name = self.optimizer.split(":")
        options: dict[str, Any] = OPTIONS[case.optimizer] | self.options
        if self.compiled and case.optimizer == "AdamW":
            options["lr"] = torch.tensor(options["lr"], device=params[0].device)
        optimizer = getattr(importlib.import_module(module), name)(params, **options)
        if self.compiled:
            optimizer.step = torch.compile(optimizer.step)
        return [optimizer]

    @property
    def version(self) -> str:
        """Name and version of the package, if it is not torch."""
        package = self.optimizer.split(".")[0]
        return "" if package == "torch" else f"{package} {importlib.metadata.version(package)}"


class Theirs(Route):
    """A peer, with ``torch.amp.GradScaler`` and ``torch.nn.utils.clip_grad_norm_``.

    In half cases it steps FP32 masters: half gradients are copied into the masters' gradients, and
    the masters into half weights, as in ``torch.amp`` or a hand-made O2.
    """

    def __init__(self, case: Case, device: torch.device, peer: Peer) -> None:
        scaler = None if peer.on_half else torch.amp.GradScaler
        super().__init__(case, device, scaler, rewrites=peer.on_half or not case.half)
        self.has_masters = case.half and not peer.on_half
        self.masters = self.params
        if self.has_masters:
            self.masters = [nn.Parameter(param.detach().float()) for param in self.params]
            for master in self.masters:
                master.grad = torch.zeros_like(master)
        self.optimizers = peer.make(case, self.masters)

    @torch.no_grad()
    def prepare(self) -> None:
        super().prepare()
        if self.case.clip and not self.scaler.is_enabled():
            torch._foreach_mul_([param.grad for param in self.params], 1 / SCALE)

    @torch.no_grad()
    def __call__(self) -> None:
        if self.has_masters:
            gradients = [param.grad for param in self.params]
            torch._foreach_copy_([master.grad for master in self.masters], gradients)
        if self.case.clip:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.masters, MAX_NORM, foreach=True)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        if self.has_masters:
            torch._foreach_copy_(self.params, self.masters)


def started(route: Any) -> Any:
    """The route after its first step, which makes the state."""
    route.prepare()
    route()
    return route


def peer_route(case: Case, device: torch.device, peer: Peer) -> Route:
    """For a worker."""
    return started(Theirs(case, device, peer))


# Tensors. torch.compile takes seconds for each on a CPU, a fraction of one on a GPU.
_COMPILED_AT_MOST = {"cpu": 50, "cuda": 300}


def peers(case: Case, device: torch.device, compiled: bool = True) -> dict[str, Peer]:
    """The peers of a case, installed or not, by the names of their rows; `compiled`: also with
    torch.compile, if that takes seconds only."""
    on_gpu, ours = device.type == "cuda", f"torch.optim:{case.optimizer}"
    if case.optimizer == "Muon":
        return {"torch": Peer(ours, agrees=False)}
    routes = {f"torch {way}": Peer(ours, {way: True}) for way in ("fused", "foreach")}
    if compiled and len(case.shapes) <= _COMPILED_AT_MOST[device.type]:
        # On a GPU the multi-tensor path, which is the one that compiles into few kernels, takes a
        # tensor as lr only with capturable.
        multi = on_gpu and case.optimizer == "AdamW"
        options = {"foreach": True, "capturable": True} if multi else {}
        routes["torch compiled"] = Peer(ours, options, compiled=True)
    if case.optimizer == "AdamW" and not case.gradients:
        if not on_gpu:
            deepspeed = "deepspeed.ops.adam:DeepSpeedCPUAdam"
            routes["DeepSpeed CPUAdam"] = Peer(deepspeed, {"adamw_mode": True})
        for package in ("bitsandbytes", "torchao"):
            eight_bits = f"{package}.optim:AdamW8bit"
            routes[f"{package} AdamW8bit"] = Peer(eight_bits, on_half=True, agrees=False)
    return routes
