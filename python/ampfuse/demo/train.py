"""One training run: the library as any script would use it.

:func:`train` is the loop to read. What differs from plain FP32 training are three lines:
``amp.initialize``, ``with amp.scale_loss`` and the ``backward`` inside it. The rest measures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ampfuse import amp
from ampfuse.demo.data import Digits
from ampfuse.demo.model import DigitsNet
from ampfuse.measuring import StepClock, StepLog, TensorMemory

_REHEARSAL_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is the same for all levels of a comparison."""

    device: torch.device
    epochs: int = 12
    batch_size: int = 128
    width: int = 128
    seed: int = 0
    channels_last: bool = True
    fuse_batchnorm: bool = False
    lr: float = 0.1

    def steps_per_epoch(self, digits: Digits) -> int:
        return len(digits.train_images) // self.batch_size


@dataclasses.dataclass(frozen=True)
class Run:
    """What one level did. The lists have one entry per step, or one per epoch."""

    level: str
    train_seconds: float
    images_per_second: float
    peak_memory_mib: float
    test_accuracy: float  # 0 to 1, after the last epoch
    steps_skipped: int
    final_loss_scale: float
    step_losses: list[float]
    step_loss_scales: list[float]
    step_skipped: list[bool]
    epoch_seconds: list[float]  # training time from the start to the end of each epoch
    epoch_accuracies: list[float]


def train(
    level: str,
    digits: Digits,
    settings: Settings,
    on_step: Callable[[], None] = lambda: None,
    on_epoch: Callable[[float], None] = lambda accuracy: None,
) -> Run:
    """Train from scratch at `level`; `on_step` and `on_epoch(accuracy)` report the progress."""
    peak_memory_mib = _rehearse(level, digits, settings)
    order = torch.Generator().manual_seed(settings.seed)
    steps = settings.epochs * settings.steps_per_epoch(digits)
    log = StepLog(steps, settings.device)
    clock = StepClock(settings.device)
    seconds, epoch_seconds, epoch_accuracies = 0.0, [], []

    model, optimizer, scheduler = _build(level, settings, steps)
    for _ in range(settings.epochs):
        model.train()
        clock.resume()
        for images, labels in digits.batches(settings.batch_size, order):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            scheduler.step()
            loss_scale = scaled_loss.detach() / loss.detach()
            log.add(loss.detach().float(), loss_scale.float(), optimizer.last_step.skipped)
            clock.mark()
            on_step()
        seconds += sum(clock.flush()) / 1e3
        epoch_seconds.append(seconds)
        epoch_accuracies.append(_accuracy(model, digits))
        on_epoch(epoch_accuracies[-1])

    losses, loss_scales, skipped = log.flush()
    return Run(
        level=level,
        train_seconds=seconds,
        images_per_second=steps * settings.batch_size / seconds,
        peak_memory_mib=peak_memory_mib,
        test_accuracy=epoch_accuracies[-1],
        steps_skipped=sum(skipped),
        final_loss_scale=amp.state_dict()["loss_scaler0"]["loss_scale"],
        step_losses=losses,
        step_loss_scales=loss_scales,
        step_skipped=skipped,
        epoch_seconds=epoch_seconds,
        epoch_accuracies=epoch_accuracies,
    )


def _build(
    level: str, settings: Settings, steps: int
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(settings.seed)  # every level starts from the same weights
    layout = torch.channels_last if settings.channels_last else torch.contiguous_format
    model = DigitsNet(settings.width).to(settings.device, memory_format=layout)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings.lr, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    # Dynamic loss scales double after so many clean steps; the default, 2000, is for longer runs.
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=level,
        growth_interval=25,
        fuse_batchnorm=settings.fuse_batchnorm,
        verbosity=0,
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total_steps=steps)
    return model, optimizer, scheduler


def _rehearse(level: str, digits: Digits, settings: Settings) -> float:
    """Train another model for a few steps, off the clock, and return its peak memory in MiB.

    Libraries choose and compile kernels at their first call, and measuring memory may take time:
    neither is to be in the times that are compared.
    """
    order = torch.Generator().manual_seed(settings.seed)
    with TensorMemory(settings.device) as memory:
        model, optimizer, _ = _build(level, settings, _REHEARSAL_STEPS)
        images, labels = next(digits.batches(settings.batch_size, order))
        for _ in range(_REHEARSAL_STEPS):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    _accuracy(model, digits)
    return memory.mib


@torch.no_grad()
def _accuracy(model: nn.Module, digits: Digits) -> float:
    model.eval()
    right = model(digits.test_images).argmax(dim=1) == digits.test_labels
    return right.float().mean().item()
