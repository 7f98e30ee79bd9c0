"""What is measured: an optimizer, the tensors it steps, their precision, and what the step does."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

_LAYER = [1024, 1024, 3072 * 1024, 3072, 1024 * 1024, 1024]  # norm, attention
_LAYER += [1024, 1024, 4096 * 1024, 4096, 1024 * 4096, 1024]  # norm, perceptron
TENSORS = {  # their sizes
    "64M": [16_000_000] * 4,
    "1B": [250_000_000] * 4,
    "2000x1": [1] * 2000,
    "2000x500": [500] * 2000,
    "1B-seldom": [250_000_000] * 4,  # four fifths of each gradient are zero in all steps
    "2000x64K": [65_536] * 2000,
    "2000x64K-odd": [65_536] * 2000,  # gradients are views into a bucket, off alignment
    "gpt2-medium": [50257 * 1024, 1024 * 1024, *_LAYER * 24, 1024, 1024],
}
# torchvision's; "-groups": a group for each tensor, as with a learning rate for each layer.
NETS = {"resnet50": "resnet50", "vit-b": "vit_b_16", "vit-b-groups": "vit_b_16"}


DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@cache
def sizes_of(net: str) -> list[int]:
    """Of the parameters of one of `NETS`, in the model's own order."""
    from torchvision import models

    with torch.device("meta"):
        model = getattr(models, NETS[net])()
    return [param.numel() for param in model.parameters()]


@dataclass(frozen=True)
class Case:
    """One benchmark.

    Attributes:
        optimizer: "AdamW", "SGD" (with momentum) or "LAMB".
        tensors: a key of `TENSORS` or `NETS`.
        precision: of model weights and gradients; half weights have FP32 masters.
        does: "clip" (unscale, overflow check, clip, update, cast back), "noclip" (all but the
            clipping), "leave" (as "clip", but FP32 gradients stay scaled: ``unscale_grads=False``),
            or "alone" (update and cast back: no scaler).
        quick: a hundredth of each tensor and of their number, to see that a benchmark runs.
    """

    optimizer: str
    tensors: str
    precision: str
    does: str = "clip"
    quick: bool = False

    @property
    def name(self) -> str:
        parts = [self.optimizer.lower(), self.tensors, self.precision]
        return "-".join(["quick"] * self.quick + parts + [self.does] * (self.does != "clip"))

    @property
    def columns(self) -> dict[str, Any]:
        """Of a row."""
        what = {"optimizer": self.optimizer, "dtype": self.precision, "does": self.does}
        return {"case": self.name, "params": self.params, **what}

    @property
    def clip(self) -> bool:
        return self.does in ("clip", "leave")

    @property
    def scaled(self) -> bool:
        return self.does != "alone"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def half(self) -> bool:
        return self.precision != "fp32"

    @property
    def sizes(self) -> list[int]:
        sizes = TENSORS.get(self.tensors) or sizes_of(self.tensors)
        if self.quick:
            sizes = [max(1, size // 100) for size in sizes[: max(4, len(sizes) // 100)]]
        return sizes

    @property
    def params(self) -> int:
        return sum(self.sizes)

    @property
    def grouped(self) -> bool:
        """Whether each tensor has a parameter group of its own."""
        return self.tensors.endswith("groups")

    @property
    def rewrites(self) -> bool:
        """Whether the step leaves unscaled gradients where the scaled ones were."""
        return self.scaled and not self.half and self.does != "leave"

    @property
    def moves_memory(self) -> bool:
        """Whether bandwidth can be the limit; of small tensors, calls and launches are the cost."""
        return self.params / len(self.sizes) > 500

    @property
    def inspect_bytes(self) -> int:
        """Read per parameter before the update: the gradient, if it is checked or measured."""
        return self.dtype.itemsize if self.scaled else 0

    @property
    def update_bytes(self) -> int:
        """Read and written per parameter by an update that holds all else in registers.

        Gradient and half weight once, FP32 weight and moments twice; gradients that are left
        unscaled are written. LAMB needs the length of its
        update before the first weight changes: once more the weight, and both moments.
        """
        h = self.dtype.itemsize
        moments = {"AdamW": 2, "LAMB": 2, "SGD": 1}[self.optimizer]
        again = 4 * (1 + moments) if self.optimizer == "LAMB" else 0
        written = h if self.half or self.rewrites else 0  # model weight, or gradient
        return h + 8 + 8 * moments + written + again

    @property
    def step_bytes(self) -> int:
        """The least that a step moves per parameter: 30 for AdamW, half weights and clipping."""
        return self.inspect_bytes + self.update_bytes


def _cases(*lines: str) -> list[Case]:
    """One of ``"optimizer tensors does precision precision..."`` for each precision of a line."""
    cases = []
    for line in lines:
        optimizer, tensors, does, *precisions = line.split()
        cases += [Case(optimizer, tensors, precision, does) for precision in precisions]
    return cases


def cases(device: str, wide: bool = False) -> list[Case]:
    """The cases of a device type, the most important first; `wide`: also what takes long.

    Without torchvision those of nets are left out.
    """
    if device == "cpu":
        usual = _cases(
            "AdamW 64M clip bf16 fp16 fp32",
            "AdamW 64M leave fp32",
            "AdamW 64M alone fp32",
            "SGD 64M clip bf16",
            "AdamW 2000x500 clip bf16 fp16",
        )
        more = _cases(
            "AdamW 64M noclip bf16 fp16",
            "SGD 64M clip fp16 fp32",
            "LAMB 64M clip bf16",
            "AdamW resnet50 clip bf16 fp16 fp32",
            "AdamW vit-b clip bf16",
            "AdamW vit-b-groups clip bf16",
        )
    else:
        usual = _cases(
            "AdamW 1B clip fp16 bf16",
            "AdamW 2000x64K clip fp16 bf16",
            "AdamW resnet50 clip fp16 bf16",
            "AdamW gpt2-medium clip bf16",
            "AdamW vit-b clip fp16 bf16",
            "SGD 1B clip fp16 bf16",
            "AdamW vit-b-groups clip fp16",
            "AdamW 1B noclip fp16",
            "LAMB 1B clip fp16",
            "AdamW 1B clip fp32",
            "AdamW 1B leave fp32",
            "AdamW 2000x64K-odd clip bf16",
            "AdamW 1B-seldom clip bf16",
        )
        more = _cases(
            "AdamW 1B noclip bf16",
            "AdamW 1B alone fp16 bf16 fp32",
            "AdamW resnet50 noclip fp16 bf16",
            "AdamW resnet50 clip fp32",
            "AdamW vit-b clip fp32",
            "AdamW 2000x64K clip fp32",
            "SGD resnet50 clip fp16 bf16",
        )
    found = usual + more if wide else usual
    return [case for case in found if case.tensors in TENSORS or find_spec("torchvision")]
