"""The arms of a comparison: the same training step in FP32, TF32, torch.amp and at O0 to O5.

An arm holds model and optimizer and knows how to run forward, backward and step in its precision.
What it tells of a step (loss scale, skipped or not) are device values: nothing here waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ampfuse import amp, half_ops
from ampfuse.experiments.config import LEVELS, RunConfig, UsageError


def build_arm(config: RunConfig, model: nn.Module, device: torch.device) -> Arm:
    """Put `model` (FP32, on `device`) and a new optimizer for it into the arm of `config`."""
    check_device(config.arm, device)
    # Else every FP32 convolution on an Ampere GPU would be TF32, torch's default.
    precision = "tf32" if config.arm == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision
    # torch's own for FP16 take a hundred times as long; a level sees to it itself.
    half_ops.use(device.type == "cpu" and config.arm == "amp-fp16")
    if config.arm in LEVELS:
        return _Level(config, model, device)
    return (_TorchAmp if config.arm in _HALVES else Arm)(config, model, device)


def check_device(arm: str, device: torch.device) -> None:
    if arm == "tf32" and not has_tf32(device):
        raise UsageError("--arm tf32: TF32 takes a GPU of sm_80 (Ampere) or later")


def has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


class Arm:
    """FP32 and TF32, which scale nothing; the other arms override what they do differently."""

    model: nn.Module
    optimizer: Optimizer

    def __init__(self, config: RunConfig, model: nn.Module, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.model = self.bare_model = model
        self._one, self._zero = torch.ones((), device=device), torch.zeros((), device=device)
        self.optimizer = self._torch_optimizer()

    def _torch_optimizer(self) -> Optimizer:
        config = self.config
        # The published loops left it at torch's default; at a level ampfuse's takes its place.
        # torch's fused SGD takes no shards.
        tuned = config.loop == "tuned" and not (config.fsdp and config.optimizer == "sgd")
        fused = True if tuned and config.arm not in LEVELS else None
        # A captured step reads its rate from the device.
        lr = torch.tensor(config.lr, device=self.device) if config.graph else config.lr
        common: dict[str, Any] = {"lr": lr, "weight_decay": config.weight_decay, "fused": fused}
        if config.optimizer == "sgd":
            return torch.optim.SGD(self.model.parameters(), momentum=config.momentum, **common)
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
        return kind(self.model.parameters(), capturable=config.graph, **common)

    def replace_model(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        self.model = wrap(self.model)

    def step(
        self, inputs: Tensor, targets: Tensor, loss_of: Callable[[Tensor, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Train on one batch. Returns loss (unscaled), loss scale used, and 1 if the step was
        skipped, else 0: float32, 0-dim, on the device."""
        self.optimizer.zero_grad()
        with self.forward():
            loss = loss_of(self.model(inputs), targets)
        scale, skipped = self._backward_and_step(loss)
        return loss.detach().float(), scale, skipped

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """Context for the model's call and the loss."""
        return contextlib.nullcontext()

    def _backward_and_step(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Returns loss scale and skipped."""
        loss.backward()
        self._clip()
        self.optimizer.step()
        return self._one, self._zero

    def _clip(self) -> None:
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.bare_model.parameters(), self.config.clip)

    @property
    def policy(self) -> dict[str, Any] | None:
        """What the arm decides of scaling, masters and batch norm, as JSON-able data; else None."""
        return None

    def loss_scale(self) -> float:
        """The present scale. Waits for the device."""
        return 1.0

    def scaler_state(self) -> dict[str, Any]:
        return {}

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`scaler_state` returned."""
        assert not state


_HALVES = {"amp-fp16": torch.float16, "amp-bf16": torch.bfloat16}


class _TorchAmp(Arm):
    """``torch.amp`` as its documentation has it: autocast, and for FP16 a GradScaler."""

    def __init__(self, config: RunConfig, model: nn.Module, device: torch.device) -> None:
        super().__init__(config, model, device)
        if config.optimizer == "sgd" and config.momentum:
            # torch's fused SGD leaves the buffers of a skipped first step uninitialized, and uses
            # them in the next. From zeros the first step comes out the same.
            for parameter in model.parameters():
                self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self._half = _HALVES[config.arm]
        self._static = config.loss_scale if isinstance(config.loss_scale, float) else None
        self._scaler = torch.amp.GradScaler(
            device.type,
            init_scale=self._static or 2.0**16,
            growth_interval=2**31 - 1 if self._static else 2000,
            enabled=self._half is torch.float16,
        )

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=self._half)

    def _backward_and_step(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        scaler = self._scaler
        if not scaler.is_enabled():
            return super()._backward_and_step(loss)
        scaler.scale(loss).backward()
        if self.config.clip is not None:
            scaler.unscale_(self.optimizer)
        self._clip()
        scaler.step(self.optimizer)
        # Public alternatives (get_scale, a look at the overflow flags) make the host wait.
        scale = scaler._get_scale_async()
        assert scale is not None
        used = scale.clone()
        scaler.update()
        return used, (scale < used).float()

    @property
    def policy(self) -> dict[str, Any] | None:
        return {"loss_scale": self._static or "dynamic"} if self._scaler.is_enabled() else None

    def loss_scale(self) -> float:
        return self._scaler.get_scale()

    def scaler_state(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state)


class _Level(Arm):
    """ampfuse: ``amp.initialize`` at O0 to O5."""

    def __init__(self, config: RunConfig, model: nn.Module, device: torch.device) -> None:
        super().__init__(config, model, device)
        options = {n: getattr(config, n) for n in ("keep_batchnorm_fp32", "loss_scale")}
        options |= {"opt_level": config.arm, "verbosity": 0}
        norms = any(isinstance(module, _BatchNorm) for module in model.modules())
        options["fuse_batchnorm"] = config.fuse_batchnorm and norms
        try:
            self.model, self.optimizer = amp.initialize(model, self.optimizer, **options)
        except (RuntimeError, ValueError, AssertionError) as error:
            raise UsageError(f"{config.arm}: {error}") from error
        self._session = self.optimizer._amp_session

    def _backward_and_step(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        with amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        if self.config.clip is not None:
            amp.clip_grad_norm_(self.optimizer, self.config.clip)
        self.optimizer.step()
        last = self.optimizer.last_step
        policy = self._session.policy
        if not policy.model_is_low_precision and policy.loss_scale == 1.0:
            return self._one, self._zero  # nothing was scaled, so nothing is noted
        return last.loss_scale, last.skipped

    @property
    def policy(self) -> dict[str, Any]:
        policy = self._session.policy
        names = ("opt_level", "keep_batchnorm_fp32", "master_weights", "loss_scale")
        fused = {"fuse_batchnorm": True} if policy.fuse_batchnorm else {}
        return {name: getattr(policy, name) for name in names} | fused

    def loss_scale(self) -> float:
        return self._session.loss_scalers[0].loss_scale()

    def scaler_state(self) -> dict[str, Any]:
        return amp.state_dict(optimizer=self.optimizer)

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        amp.load_state_dict(state, optimizer=self.optimizer)


@contextlib.contextmanager
def evaluating(arm: Arm) -> Iterator[None]:
    """Evaluation mode, without gradients, in the arm's precision."""
    arm.model.eval()
    try:
        with torch.no_grad(), arm.forward():
            yield
    finally:
        arm.model.train()
