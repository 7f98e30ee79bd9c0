"""What would make the step faster, and by how much: from the shares of a step's time.

Each rule is a row of `RULES`: what to do, where it applies, and what part of which time it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from ampfuse import hardware
from ampfuse.doctor.kinds import HALVES, precision
from ampfuse.doctor.timeline import Operation
from ampfuse.insight.findings import Finding
from ampfuse.optim.fused import FUSED

LEAST_GAIN = 1.05  # below that, noise decides


@dataclass
class Case:
    """What is known of a script's step.

    Attributes:
        ms: by kind of work; they sum up to `step_ms`.
        operations: the longest first.
        optimizers: the types of those that step.
        workers: whether the DataLoader has some; None if there is no DataLoader.
    """

    device: torch.device
    step_ms: float
    ms: dict[str, float]
    operations: list[Operation]
    optimizers: Collection[type[Optimizer]] = ()
    workers: bool | None = None

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def half(self) -> str | None:
        """The half type that the device computes in: "BF16", "FP16", or None."""
        if self.on_gpu:
            return "BF16" if torch.cuda.get_device_capability(self.device) >= (8, 0) else "FP16"
        return "BF16" if hardware.cpu_has_bf16() else None

    def full_ms(self, *kinds: str) -> float:
        """Of operations of `kinds` that are not in half precision."""
        full = (op for op in self.operations if precision(op.event) not in HALVES)
        return sum(op.ms for op in full if op.kind in kinds)


class Rule(NamedTuple):
    """What to do, how, when it applies, and the milliseconds of a step of which it saves `part`.

    Of the whole a gain is "at most", as if nothing came in its place; of a part it is "about". No
    gain is promised without `ms`.
    """

    what: str
    remedy: str
    when: Callable[[Case], bool]
    ms: Callable[[Case], float] | None
    part: float = 1.0


def _of(kind: str) -> Callable[[Case], float]:
    return lambda case: case.ms.get(kind, 0.0)


def _half_pays(name: str) -> Callable[[Case], bool]:
    return lambda case: case.half == name and case.full_ms("matrix") > 0.1 * case.step_ms


def _full(case: Case) -> float:
    return case.full_ms("matrix", "memory", "norm")


def _has_half_images_with_channels_first(case: Case) -> bool:
    for op in case.operations:
        if "conv" in op.name and precision(op.event) in HALVES:
            dims, strides = op.event.dims[0], op.event.strides[0]
            if len(dims) == 4 and dims[1] > 1 and strides[1] != 1:
                return True
    return False


_LOAD = "load data in the background"
_INITIALIZE = 'model, optimizer = amp.initialize(model, optimizer, opt_level="{}")'
# fmt: off
RULES = (
    Rule(_LOAD, "prepare batches in a torch.utils.data.DataLoader with num_workers, not in the "
         "loop", lambda case: case.workers is None, _of("data")),
    Rule(_LOAD, "DataLoader(num_workers=..., persistent_workers=True): one for each core, more if "
         "they wait for files", lambda case: case.workers is False, _of("data")),
    Rule("faster loading", "more num_workers, if there are cores or they wait for files; cheaper "
         "transforms", lambda case: bool(case.workers), _of("data")),
    # Half as many bytes; units for half precision gain more, and small products less.
    Rule("BF16 (O5)", _INITIALIZE.format("O5"), _half_pays("BF16"), _full, 0.5),
    Rule("FP16 (O2)", _INITIALIZE.format("O2"), _half_pays("FP16"), _full, 0.5),
    Rule("channels_last", "model.to(memory_format=torch.channels_last), and the images too: in "
         "half precision convolutions are made for it", _has_half_images_with_channels_first, None),
    Rule("fused optimizer", "the one of the same name in ampfuse.optim, or opt_level O0: one pass "
         "over all parameters", lambda case: not FUSED.keys().isdisjoint(case.optimizers),
         _of("optimizer"), 0.5),
    Rule("one launch for a whole step", "ampfuse.graphs.make_graphed_step(model, loss_fn, "
         "optimizer, batch): a CUDA graph", lambda case: case.on_gpu, _of("host")),
    Rule("fewer and larger operations", "larger batches; torch.compile(model)",
         lambda case: not case.on_gpu, _of("host")),
    Rule("less Python in a step", "the script's own Python (numpy, logging, files) holds up the "
         "step: move it out of it", lambda case: True, _of("python")),
    Rule("no waiting for the GPU", "keep numbers on the device, and read them (.item(), .cpu()) "
         "every hundred steps", lambda case: case.on_gpu, _of("sync")),
    Rule("less communication", "overlap it with the backward pass (DistributedDataParallel), or "
         "send half precision", lambda case: True, _of("communication")),
    Rule("fewer casts", "keep tensors in one type from the model's input to its output; O2 and O5 "
         "keep weights in half, where autocast casts them in every step",
         lambda case: True, _of("cast")),
    Rule("fewer transpositions", "keep images in one memory format, call .contiguous() once and "
         "not in each step", lambda case: True, _of("layout")),
)
# fmt: on


def find(case: Case) -> list[Finding]:
    """What pays, in the order of gain; last what has none that is known."""
    found = []
    for rule in RULES:
        if not rule.when(case):
            continue
        if rule.ms is None:
            found.append(Finding(rule.what, rule.remedy, found="not estimated"))
        elif (gain := _gain(case, rule.part * rule.ms(case))) >= LEAST_GAIN:
            basis = "at most" if rule.part == 1 else "about"
            found.append(Finding(rule.what, rule.remedy, found=f"{basis} {gain:.2f}x", gain=gain))
    return sorted(found, key=lambda one: -(one.gain or 0.0))


def half_limit(case: Case) -> tuple[float, str]:
    """How much half precision can gain at most, by Amdahl's law, and why."""
    matrix = case.full_ms("matrix")
    limit = _gain(case, matrix + case.full_ms("memory", "norm") / 2)
    share = f"{matrix / case.step_ms:.0%} of a step"
    return limit, (
        f"At most {limit:.2f}x from half precision, if the FP32 matrix work ({share}) took no time."
    )


def _gain(case: Case, saved_ms: float) -> float:
    return case.step_ms / max(case.step_ms - saved_ms, 0.01 * case.step_ms)
