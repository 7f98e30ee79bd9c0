"""What one run is: every setting resolved, as plain data that checkpoints and results can hold."""

from __future__ import annotations

import dataclasses
from typing import Any

FORMAT = 1  # of the result files

ARMS = ("fp32", "tf32", "amp-fp16", "amp-bf16", "O0", "O1", "O2", "O3", "O4", "O5")
LEVELS = ARMS[4:]

DESCRIPTIONS = {
    "fp32": "FP32, TF32 off",
    "tf32": "FP32 weights, TF32 products",
    "amp-fp16": "torch.amp, FP16 with GradScaler",
    "amp-bf16": "torch.amp, BF16",
    "O0": "ampfuse, FP32",
    "O1": "ampfuse, FP16 autocast",
    "O2": "ampfuse, FP16 + masters",
    "O3": "ampfuse, FP16 alone",
    "O4": "ampfuse, BF16 autocast",
    "O5": "ampfuse, BF16 + masters",
}

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "linear", "cosine", "steps")


class UsageError(Exception):
    """A wish that cannot be met. The message is one line for the user; the exit status is 2."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One run: one arm, one repeat. Names are those of the flags.

    Attributes that the names leave open:
        method: what plots call the arm; E1's name (FP32, FP16, amp) if it was asked for by that.
        batch_size: images per process and step.
        iterations, epochs: the length; with both, whichever ends first.
        data: "digits", "synthetic" or the path of a folder.
        loop: "tuned", or "original": the loop of the published script, which reads the loss from
            the device at every step.
        warmup: share of the run in which the rate climbs.
        clip: largest L2 norm of the gradients, or None.
        loss_scale: a number, "dynamic", or None for what the arm does by itself.
        print_freq: steps per interval, after which the host waits for the device and logs.
        synthetic_size: training images of synthetic data, before rounding up to a batch.
    """

    experiment: str
    model: str
    data: str
    arm: str
    method: str
    recipe: str | None
    batch_size: int
    optimizer: str
    lr: float
    iterations: int | None = None
    epochs: int | None = None
    repeat: int = 0
    repeats: int = 1
    seed: int = 0
    loop: str = "tuned"
    image_size: int = 32
    loader: str = "resident"
    workers: int = 2
    augment: bool = False
    shuffle: bool = True
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    synthetic_size: int = 2048
    dropout: float | None = None
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup: float = 0.0
    clip: float | None = None
    loss_scale: float | str | None = None
    keep_batchnorm_fp32: bool | None = None
    evaluate: bool = True
    channels_last: bool = True
    cudnn_benchmark: bool = True
    deterministic: bool = False
    graph: bool = False
    compile: bool = False
    sync_bn: bool = False
    print_freq: int = 50

    @property
    def title(self) -> str:
        repeat = f", repeat {self.repeat + 1} of {self.repeats}" if self.repeats > 1 else ""
        return f"{self.model} {self.method}{repeat}"

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in values.items() if name in known}
        for name in ("mean", "std"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        return cls(**values)
