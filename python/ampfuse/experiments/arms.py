"""The arms of a comparison: the same training step in FP32, TF32, torch.amp and at O0 to O5.

An arm holds model and optimizer and knows how to run forward, backward and step in its precision.
What it tells of a step (loss scale, skipped or not) are device values: nothing here waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampfuse import amp, half_ops
from ampfuse.experiments.settings import LEVELS, Settings
from ampfuse.graphs import GraphedCall

Loss = Callable[[Tensor, Tensor], Tensor]
_HALVES = {"amp-fp16": torch.float16, "amp-bf16": torch.bfloat16}


def build_arm(settings: Settings, model: nn.Module, loss_of: Loss, device: torch.device) -> Arm:
    """Put `model` (FP32, on `device`) and a new optimizer for it into the arm of `settings`."""
    # Else every FP32 convolution on an Ampere GPU would be TF32, torch's default.
    precision = "tf32" if settings.arm == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision
    # torch's own for FP16 take a hundred times as long; a level sees to it itself.
    half_ops.use(device.type == "cpu" and settings.arm == "amp-fp16")
    kind = _Level if settings.arm in LEVELS else Arm
    return kind(settings, model, loss_of, device)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """To the targets; of images (digits, MNIST) the target is the class as a vector."""
    if not targets.is_floating_point():
        targets = F.one_hot(targets, outputs.shape[1]).to(outputs.dtype)
    return F.mse_loss(outputs, targets)


class Arm:
    """FP32, TF32, and ``torch.amp`` as its documentation has it: autocast, for FP16 a GradScaler.

    Attributes:
        step: ``step(inputs, targets)`` trains on one batch, as one CUDA graph if the settings say
            so, and returns loss (unscaled), loss scale used, and 1 if the step was skipped, else 0:
            float32, 0-dim, on the device.
        bare_model: `model` without what trains it in several processes.
        scaler: the loss scaler, whose state checkpoints carry.
        policy: what the arm decides of scaling, masters and batch norm, as JSON can say it.
    """

    policy: dict[str, Any]

    def __init__(self, of: Settings, model: nn.Module, loss_of: Loss, device: torch.device) -> None:
        self.settings, self.loss_of, self.device = of, loss_of, device
        self.model = self.bare_model = model
        self._one, self._zero = torch.ones((), device=device), torch.zeros((), device=device)
        # At a level ampfuse's takes its place. torch's fused SGD takes no shards. A captured step
        # reads its rate from the device.
        sharded_sgd = of.fsdp and of.optimizer == "sgd"
        fused = True if of.arm not in LEVELS and not sharded_sgd else None
        lr = torch.tensor(of.lr, device=device) if of.graph else of.lr
        options: dict[str, Any] = {"lr": lr, "weight_decay": of.weight_decay, "fused": fused}
        options |= {"momentum": of.momentum} if of.optimizer == "sgd" else {"capturable": of.graph}
        kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        self.optimizer: Any = kinds[of.optimizer](model.parameters(), **options)
        self.step = GraphedCall(self._step) if of.graph else self._step
        self._set_up()

    def _set_up(self) -> None:
        """Put model and optimizer, which are there, into the precision."""
        settings = self.settings
        self._half = _HALVES.get(settings.arm)
        static = settings.loss_scale if isinstance(settings.loss_scale, float) else None
        self.scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=static or 2.0**16,
            growth_interval=2**31 - 1 if static else 2000,
            enabled=self._half is torch.float16,
        )
        self.policy = {"loss_scale": static or "dynamic"} if self.scaler.is_enabled() else {}
        if self._half and settings.optimizer == "sgd" and settings.momentum:
            # torch's fused SGD leaves the buffers of a skipped first step uninitialized, and uses
            # them in the next. From zeros the first step comes out the same.
            for parameter in self.model.parameters():
                self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def set_lr(self, lr: float) -> None:
        """Write `lr` into every group; into its tensor where a captured step reads that."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _step(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.optimizer.zero_grad()
        with self.forward():
            loss = self.loss_of(self.model(inputs), targets)
        scale, skipped = self._backward_and_step(loss)
        return loss.detach().float(), scale, skipped

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """Context for the model's call and the loss."""
        if self._half is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._half)

    def _backward_and_step(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Returns loss scale and skipped."""
        scaler, clip = self.scaler, self.settings.clip
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.bare_model.parameters(), clip)
        scaler.step(self.optimizer)
        if not scaler.is_enabled():
            return self._one, self._zero
        # Public alternatives (get_scale, a look at the overflow flags) make the host wait.
        scale = scaler._get_scale_async()
        assert scale is not None
        used = scale.clone()
        scaler.update()
        return used, (scale < used).float()

    def test(self, batches: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
        """Sum of the losses, right answers and number of the images in `batches`, by the bare
        model in evaluation mode. Waits for the device."""
        loss, right = torch.zeros(2, dtype=torch.float64, device=self.device)
        images = 0
        self.model.eval()
        with torch.no_grad(), self.forward():
            for inputs, targets in batches:
                outputs = self.bare_model(inputs)
                loss += self.loss_of(outputs, targets).double() * len(targets)
                if not targets.is_floating_point():
                    right += (outputs.argmax(1) == targets).sum()
                images += len(targets)
        self.model.train()
        return [loss.item(), right.item(), float(images)]

    def loss_scale(self) -> float:
        """The present scale. Waits for the device."""
        return self.scaler.get_scale()


class _Level(Arm):
    """ampfuse: ``amp.initialize`` at O0 to O5."""

    _half = None

    def _set_up(self) -> None:
        settings, model = self.settings, self.model
        names = ("keep_batchnorm_fp32", "loss_scale", "growth_interval")
        options = {name: getattr(settings, name) for name in names}
        norms = any(isinstance(module, _BatchNorm) for module in model.modules())
        options |= {"opt_level": settings.arm, "verbosity": 0, "fuse": settings.fuse and norms}
        self.model, self.optimizer = amp.initialize(model, self.optimizer, **options)
        session = self.optimizer._amp_session
        policy, self.scaler = session.policy, session.loss_scalers[0]
        self._scales = policy.model_is_low_precision or policy.loss_scale != 1.0
        names = ("keep_batchnorm_fp32", "master_weights", "loss_scale", "fuse")
        self.policy = {name: getattr(policy, name) for name in names}

    def _backward_and_step(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        if self.settings.clip is not None:
            amp.clip_grad_norm_(self.optimizer, self.settings.clip)
        self.optimizer.step()
        if not self._scales:  # then nothing is noted
            return self._one, self._zero
        last = self.optimizer.last_step
        return last.loss_scale, last.skipped

    def loss_scale(self) -> float:
        return self.scaler.loss_scale()
