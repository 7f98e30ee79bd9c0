"""The variants of a comparison: the same training step in FP32, TF32, torch.amp and at O0 to O5.

A step returns tensors (loss, loss scale, skipped or not), so that it does not wait for the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampfuse import amp, half_ops
from ampfuse.experiments.settings import HALF_LEVELS, LEVELS, Settings
from ampfuse.graphs import GraphedCall

Loss = Callable[[Tensor, Tensor], Tensor]
_HALVES = {"amp-fp16": torch.float16, "amp-bf16": torch.bfloat16}
_OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def build_variant(
    settings: Settings, model: nn.Module, loss_of: Loss, device: torch.device
) -> Variant:
    """The variant of `settings`, with `model` (FP32, on `device`) and a new optimizer. Sets what
    torch keeps for the whole process."""
    torch.backends.cudnn.benchmark = not settings.deterministic
    torch.backends.cudnn.deterministic = settings.deterministic
    torch.use_deterministic_algorithms(settings.deterministic, warn_only=True)
    # By default, torch computes FP32 convolutions in TF32 on an Ampere GPU.
    precision = "tf32" if settings.precision == "tf32" else "ieee"
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.conv.fp32_precision = precision
    # torch's FP16 kernels take a hundred times as long; a level enables ours itself.
    half_ops.use(device.type == "cpu" and settings.precision == "amp-fp16")
    return (_Level if settings.precision in LEVELS else Variant)(settings, model, loss_of, device)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error; the target of an image (digits, MNIST) is its class as a vector."""
    if not targets.is_floating_point():
        targets = nn.functional.one_hot(targets, outputs.shape[1]).to(outputs.dtype)
    return nn.functional.mse_loss(outputs, targets)


class Variant:
    """FP32, TF32, and ``torch.amp`` as documented: autocast, and a GradScaler for FP16.

    Attributes:
        step: ``step(inputs, targets)`` trains on one batch, as one CUDA graph if the settings say
            so, and returns unscaled loss, loss scale, and 1 if the step was skipped, else 0:
            float32, 0-dim, on the device.
        bare_model: `model` without the wrapper for several processes.
        scaler: the loss scaler.
        policy: options that the precision chose (loss scale, masters, FP32 batch norms, fusion),
            for the result file.
    """

    policy: dict[str, Any]

    def __init__(
        self, settings: Settings, model: nn.Module, loss_of: Loss, device: torch.device
    ) -> None:
        self.settings, self.loss_of, self.device = settings, loss_of, device
        self.model = self.bare_model = model
        self._one, self._zero = torch.ones((), device=device), torch.zeros((), device=device)
        # A level replaces the optimizer by ampfuse's. torch's fused SGD does not support shards. A
        # captured step reads its learning rate from the device.
        sharded_sgd = settings.fsdp and settings.optimizer == "sgd"
        fused = True if settings.precision not in LEVELS and not sharded_sgd else None
        lr = torch.tensor(settings.lr, device=device) if settings.graph else settings.lr
        options: dict[str, Any] = {"lr": lr, "weight_decay": settings.weight_decay, "fused": fused}
        if settings.optimizer == "sgd":
            options["momentum"] = settings.momentum
        else:
            options["capturable"] = settings.graph
        self.optimizer: Any = _OPTIMIZERS[settings.optimizer](model.parameters(), **options)
        self.step = GraphedCall(self.eager_step) if settings.graph else self.eager_step
        self._half = _HALVES.get(settings.precision)
        self._set_up()

    def _set_up(self) -> None:
        """Convert model and optimizer to the precision."""
        settings = self.settings
        static = settings.loss_scale if isinstance(settings.loss_scale, float) else None
        self._static = static
        self.scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=static or 2.0**16,
            growth_interval=2**31 - 1 if static else settings.growth_interval,
            enabled=self._half is torch.float16,
        )
        scale = (static or "dynamic") if self.scaler.is_enabled() else None
        self.policy = {"keep_batchnorm_fp32": None, "loss_scale": scale, "fuse": False}
        if self.scaler.is_enabled() and settings.optimizer == "sgd" and settings.momentum:
            # torch's fused SGD leaves the buffers uninitialized if the first step is skipped, and
            # uses them in the next. With zeros the first step gives the same result.
            for parameter in self.model.parameters():
                self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def set_lr(self, lr: float) -> None:
        """Set `lr` in every group; in its tensor, if a captured step reads that."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def eager_step(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`step` without a graph."""
        self.optimizer.zero_grad()
        with self.autocast():
            loss = self.loss_of(self.model(inputs), targets)
        scale, skipped = self._backward_and_step(loss)
        return loss.detach().float(), scale, skipped

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Context for the model's call and the loss."""
        autocast = torch.autocast(self.device.type, self._half)
        return autocast if self._half else contextlib.nullcontext()

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
        # Public alternatives (get_scale, the overflow flags) make the host wait.
        used = scaler._get_scale_async().clone()
        scaler.update()
        skipped = (scaler._get_scale_async() < used).float()
        if self._static:  # a GradScaler backs off from any scale
            scaler.update(self._static)
        return used, skipped

    def test(self, batches: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
        """Sum of the losses, correct answers and number of images of `batches`, in evaluation
        mode. Waits for the device."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        images = 0
        self.model.eval()
        with torch.no_grad(), self.autocast():
            for inputs, targets in batches:
                outputs = self.bare_model(inputs)
                loss += self.loss_of(outputs, targets).double() * len(targets)
                if not targets.is_floating_point():
                    right += (outputs.argmax(1) == targets).sum()
                images += len(targets)
        self.model.train()
        return [loss.item(), right.item(), float(images)]

    def loss_scale(self) -> float:
        """Waits for the device."""
        return self.scaler.get_scale()


class _Level(Variant):
    """ampfuse: ``amp.initialize`` at O0 to O5."""

    def _set_up(self) -> None:
        settings = self.settings
        has_norms = any(isinstance(module, _BatchNorm) for module in self.model.modules())
        half_weights = settings.precision in HALF_LEVELS
        fuse = settings.fuse
        if fuse is None:  # sharded apart from half weights, batch norms cannot be fused
            fuse = settings.precision not in ("O0", "O3") and settings.channels_last
            fuse = fuse and not (settings.fsdp and half_weights)
        self.model, self.optimizer = amp.initialize(
            self.model,
            self.optimizer,
            opt_level=settings.precision,
            keep_batchnorm_fp32=settings.keep_batchnorm_fp32 if half_weights else None,
            loss_scale=settings.loss_scale if settings.precision != "O0" else None,
            growth_interval=settings.growth_interval,
            fuse=fuse and has_norms,
            verbosity=0,
        )
        self.optimizer.max_skipped_steps = None  # a run counts them, of all variants alike
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
        if not self._scales:
            return self._one, self._zero
        last = self.optimizer.last_step
        return last.loss_scale, last.skipped

    def loss_scale(self) -> float:
        return self.scaler.loss_scale()
