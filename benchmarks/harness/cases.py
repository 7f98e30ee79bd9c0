"""The cases: an optimizer, the tensors it steps, their precision, and the work of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch

Shape = tuple[int, ...]

_LAYER = [1024, 1024, 3072 * 1024, 3072, 1024 * 1024, 1024]  # norm, attention
_LAYER += [1024, 1024, 4096 * 1024, 4096, 1024 * 4096, 1024]  # norm, MLP
SIZES = {
    "64M": [16_000_000] * 4,
    "1B": [250_000_000] * 4,
    "2000x1": [1] * 2000,
    "2000x500": [500] * 2000,
    "2000x64K": [65_536] * 2000,
    "gpt2-medium": [50257 * 1024, 1024 * 1024, *_LAYER * 24, 1024, 1024],
}
NETWORKS = {"resnet18": "resnet18", "resnet50": "resnet50", "vit-b": "vit_b_16"}  # torchvision's
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@cache
def shapes_of(tensors: str) -> list[Shape]:
    """Weights that Muon orthogonalizes have their shape; embeddings and heads are flat."""
    if tensors == "gpt2-small":
        e = 768
        layer: list[Shape] = [(3 * e, e), (e, e), (4 * e, e), (e, 4 * e)]
        layer += [(n,) for n in (3 * e, e, 4 * e, e, e, e, e, e)]
        return [(50257 * e,), (1024 * e,), *layer * 12]
    if tensors in SIZES:
        return [(size,) for size in SIZES[tensors]]
    from torchvision import models

    with torch.device("meta"):
        model = getattr(models, NETWORKS[tensors])()
    return [tuple(p.shape) if p.ndim == 4 else (p.numel(),) for p in model.parameters()]


@dataclass(frozen=True)
class Case:
    """One benchmark.

    Attributes:
        optimizer: "AdamW", "SGD" (with momentum) or "Muon" (AdamW for what is flat).
        tensors: what `shapes_of` takes.
        precision: of model weights and gradients; half weights have FP32 masters.
        does: "clip" (unscale, overflow check, clip, update, cast back) or "alone" (update and cast
            back: no scaler).
        gradients: "new": each is another tensor before every step, as after ``zero_grad()`` and a
            backward pass; "same" or "": they are where they were.
        quick: a thousandth of each flat tensor and a hundredth of their number, to see that a
            benchmark runs.
    """

    optimizer: str
    tensors: str
    precision: str
    does: str = "clip"
    gradients: str = ""
    quick: bool = False

    @property
    def name(self) -> str:
        quick = "quick" if self.quick else ""
        does = "" if self.clip else self.does
        what = self.optimizer.lower(), self.tensors, self.precision, self.gradients
        return "-".join(filter(None, [quick, *what, does]))

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of a row."""
        what = {"case": self.name, "optimizer": self.optimizer, "params": self.params}
        return what | {"dtype": self.precision, "does": self.does}

    @property
    def clip(self) -> bool:
        return self.does == "clip"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.precision]

    @property
    def half(self) -> bool:
        return self.precision != "fp32"

    @property
    def shapes(self) -> list[Shape]:
        shapes = shapes_of(self.tensors)
        if self.quick:
            few = shapes[: max(4, len(shapes) // 100)]
            shapes = [s if len(s) > 1 else (max(1, s[0] // 1000),) for s in few]
        return shapes

    @property
    def params(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def rewrites(self) -> bool:
        """Whether the step overwrites scaled gradients by unscaled ones."""
        return self.clip and not self.half

    @property
    def moves_memory(self) -> bool:
        """Whether bandwidth can be the limit, and not calls and launches."""
        return self.params / len(self.shapes) > 500 and self.optimizer != "Muon"

    @property
    def inspect_bytes(self) -> int:
        """Read per parameter before the update: the gradient, if it is checked and measured."""
        return self.dtype.itemsize if self.clip else 0

    @property
    def update_bytes(self) -> float:
        """Read and written per parameter by an update that has everything else in registers.

        Gradient and half weight once, FP32 weight and moments twice; gradients that are left
        unscaled are written. Unknown for Muon's products.
        """
        h, moments = self.dtype.itemsize, {"AdamW": 2, "SGD": 1, "Muon": math.nan}[self.optimizer]
        written = h if self.half or self.rewrites else 0  # model weight, or gradient
        return h + 8 + 8 * moments + written

    @property
    def step_bytes(self) -> float:
        """The least that a step moves per parameter: 30 for AdamW, half weights and clipping."""
        return self.inspect_bytes + self.update_bytes


# Optimizer, tensors, what the step does, and its precisions; the most important first. The second
# paragraph takes long, and runs only when asked for.
_CASES = {
    "cpu": """
AdamW 64M clip bf16 fp16 fp32
AdamW 64M alone fp32 bf16
SGD 64M clip bf16
AdamW 2000x500 clip bf16 fp16

SGD 64M clip fp16 fp32
AdamW resnet50 clip bf16 fp16
AdamW vit-b clip bf16
Muon resnet18 clip bf16
Muon gpt2-small clip bf16""",
    "cuda": """
AdamW 1B clip fp16 bf16
AdamW 2000x64K clip fp16 bf16
AdamW resnet50 clip fp16 bf16
AdamW gpt2-medium clip bf16
AdamW vit-b clip fp16 bf16
SGD 1B clip fp16 bf16
AdamW 1B clip fp32

AdamW 1B alone fp16 bf16 fp32
SGD resnet50 clip fp16 bf16
Muon gpt2-small clip bf16
Muon resnet18 clip bf16""",
}


def cases(device: str, wide: bool = False) -> list[Case]:
    """The cases of a device type; `wide`: also what takes long.

    Without torchvision those of networks are left out.
    """
    usual, more = _CASES[device].strip().split("\n\n")
    found = []
    for line in [*usual.splitlines(), *(more.splitlines() if wide else ())]:
        optimizer, tensors, does, *precisions = line.split()
        if tensors not in NETWORKS or find_spec("torchvision"):
            found += [Case(optimizer, tensors, precision, does) for precision in precisions]
    return found


def host_cases(device: str) -> list[Case]:
    """Steps whose kernels are next to nothing."""
    tensors = "2000x64K" if device == "cuda" else "2000x1"
    kinds = product(DTYPES, ("same", "new"))
    return [Case("AdamW", tensors, precision, gradients=kind) for precision, kind in kinds]
