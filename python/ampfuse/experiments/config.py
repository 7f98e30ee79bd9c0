"""What one run is: every setting resolved, as plain data that checkpoints and results can hold.

A field that the user may choose declares its flag beside it; the command line (:mod:`cli`) is made
of these declarations. Nothing heavy is imported: ``--help`` must not wait for torch.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from ampfuse.command_line import UsageError as UsageError
from ampfuse.command_line import at_least, fraction, positive

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
ARMS = tuple(DESCRIPTIONS)
LEVELS = ARMS[4:]
HALF_LEVELS = ("O2", "O3", "O5")  # whose weights are half, but for batch norms'

WHAT, PRECISION, LENGTH = "what to train", "precision", "length"
RULE, SPEED, WHERE = "optimizer", "speed, for every arm alike", "where"
GROUPS = (WHAT, PRECISION, LENGTH, RULE, SPEED, WHERE)


def numbers(text: str) -> list[int]:
    """The type of ``--batch-size``: numbers with commas between them."""
    return list(dict.fromkeys(map(at_least(1), text.split(","))))


def scale(text: str) -> float | str:
    """The type of ``--loss-scale``; "None" is an old script's default, passed on."""
    return text if text in ("dynamic", "None") else positive(text)


def _flag(group: str, *names: str, default: Any = None, help: str = "", **options: Any) -> Any:
    """A field with a flag; in its `help` stand, in braces, attributes of the trainer."""
    options |= {"help": help} if help else {}
    return dataclasses.field(default=default, metadata={"group": group, "names": names, **options})


_SWITCH: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
_ON: dict[str, Any] = {"action": "store_true"}
_COUNT: dict[str, Any] = {"type": at_least(1), "metavar": "N"}
_NUMBER: dict[str, Any] = {"type": float, "metavar": "X"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: one arm, one batch size, one repeat. Names are those of the flags.

    `recipe` is None if nobody published these settings together; `method` is what plots call the
    arm: E1's name (FP32, FP16, amp) if it was asked for by that. `batch_size` is of each process.
    With `iterations` and `epochs` a run has the length of whichever ends first. `clip` is a norm,
    `warmup` a share of the run. `loss_scale` is a number, "dynamic", or None for what the arm does
    by itself. `synthetic_size` is rounded up to a batch. `mean` and `std` are of the pixels, as
    shares of 255; None for those of the data set.
    """

    experiment: str
    recipe: str | None = None
    arm: str = "fp32"
    method: str = "fp32"
    repeat: int = 0
    # fmt: off
    data: str = _flag(
        WHAT, "--data", default="synthetic", metavar="PATH|digits|synthetic",
        help="a folder with the data set (MNIST and CIFAR-10 are downloaded into an empty one), "
        "scikit-learn's handwritten digits, or noise (default: {default_data})",
    )
    model: str = _flag(
        WHAT, "--model", "-a", default="vgg16", metavar="NAME",
        help="{model_names} (default: the recipe's, else {default_model})",
    )
    image_size: int = _flag(WHAT, "--image-size", default=32, help="pixels each way", **_COUNT)
    dropout: float | None = _flag(
        WHAT, "--dropout", type=fraction, metavar="P", help="where the model has it"
    )
    loss_scale: float | str | None = _flag(
        PRECISION, "--loss-scale", type=scale, metavar="N|dynamic", help="of the arms that scale"
    )
    keep_batchnorm_fp32: bool | None = _flag(
        PRECISION, "--keep-batchnorm-fp32", help="at O2, O3 and O5", **_SWITCH
    )
    fuse_batchnorm: bool = _flag(
        PRECISION, "--fuse-batchnorm", default=False, **_SWITCH,
        help="BatchNorm, add and ReLU in one pass, at a level (default: on at O1, O2, O4 and O5 "
        "with --channels-last)",
    )
    epochs: int | None = _flag(LENGTH, "--epochs", **_COUNT)
    iterations: int | None = _flag(LENGTH, "--iterations", help="training steps", **_COUNT)
    repeats: int = _flag(LENGTH, "--repeats", default=1, help="runs per arm, seeds apart", **_COUNT)
    seed: int = _flag(
        LENGTH, "--seed", default=0, type=int, metavar="N", help="of the first repeat (default: 0)"
    )
    batch_size: int = _flag(
        LENGTH, "--batch-size", "-b", default=128, type=numbers, metavar="N ...",
        help="of each process; one or several, each with runs of its own",
    )
    optimizer: str = _flag(RULE, "--optimizer", default="sgd", choices=("sgd", "adam", "adamw"))
    lr: float = _flag(RULE, "--lr", default=0.01, type=positive, metavar="X")
    momentum: float = _flag(RULE, "--momentum", default=0.9, help="of SGD", **_NUMBER)
    weight_decay: float = _flag(RULE, "--weight-decay", default=0.0, **_NUMBER)
    clip: float | None = _flag(RULE, "--clip", type=positive, metavar="NORM")
    schedule: str = _flag(
        RULE, "--schedule", default="constant", choices=("constant", "linear", "cosine", "steps")
    )
    warmup: float = _flag(
        RULE, "--warmup", default=0.0, type=fraction, metavar="SHARE", help="of the run, 0 to 1"
    )
    loop: str = _flag(
        SPEED, "--loop", default="tuned", choices=("tuned", "original"),
        help="original: that of the published script, as a further row (its loader, the loss read "
        "at every step, torch's memory format)",
    )
    loader: str = _flag(
        SPEED, "--loader", default="resident", choices=("resident", "workers"),
        help="whole set on the device, or worker processes",
    )
    workers: int = _flag(
        SPEED, "--workers", "-j", default=2, type=at_least(0), metavar="N", help="loader processes"
    )
    channels_last: bool = _flag(
        SPEED, "--channels-last", default=True, help="NHWC (default: on)", **_SWITCH
    )
    cudnn_benchmark: bool = _flag(
        SPEED, "--cudnn-benchmark", default=True, help="let cuDNN try (default: on)", **_SWITCH
    )
    graph: bool = _flag(SPEED, "--graph", default=False, help="the step as one CUDA graph", **_ON)
    compile: bool = _flag(SPEED, "--compile", default=False, help="torch.compile", **_ON)
    deterministic: bool = _flag(
        SPEED, "--deterministic", default=False, help="the same bits every time", **_ON
    )
    sync_bn: bool = _flag(SPEED, "--sync-bn", default=False, help="batch norm across GPUs", **_ON)
    fsdp: bool = _flag(
        SPEED, "--fsdp", default=False, **_ON,
        help="shards of the model on the processes (FSDP2) in place of copies (DDP)",
    )
    evaluate: bool = _flag(
        WHERE, "--evaluate", default=True, help="test after each epoch", **_SWITCH
    )
    print_freq: int = _flag(
        WHERE, "--print-freq", "-p", default=50,
        help="steps between two looks at the loss (default: 50, on a CPU 5)", **_COUNT,
    )
    # fmt: on
    augment: bool = False
    shuffle: bool = True
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    synthetic_size: int = 2048

    @property
    def title(self) -> str:
        repeat = f", repeat {self.repeat + 1} of {self.repeats}" if self.repeats > 1 else ""
        return f"{self.model} {self.method}{repeat}"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        """The inverse of ``dataclasses.asdict``; what this version does not know is left out."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(
            **{
                name: tuple(value) if isinstance(value, list) else value
                for name, value in values.items()
                if name in known
            }
        )


# The fields that have a flag.
FLAGS = {field.name: field for field in dataclasses.fields(RunConfig) if field.metadata}
