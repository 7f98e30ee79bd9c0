"""What would make the step faster, and by how much: measured on the script's own shapes."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ampfuse import hardware
from ampfuse.insight.diagnosis.kinds import HALVES, precision
from ampfuse.insight.diagnosis.replay import (
    Input,
    Operation,
    pad_to,
    race,
    speed_ratios,
    to_channels_last,
    to_dtype,
)
from ampfuse.insight.diagnosis.report import Advice
from ampfuse.insight.diagnosis.watch import Loading, Stepper
from ampfuse.nn.functional import batch_norm_act
from ampfuse.optim.fused import FUSED

LEAST_GAIN = 1.05  # below that, noise decides
_BUDGET_S = 30.0
_MOST_OPERATIONS = 24
_MOST_ELEMENTS = 50_000_000  # of parameters that are stepped to time an optimizer

_GEMMS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm"))


@dataclass
class Case:
    """What is known of a script's step.

    Attributes:
        ms: by kind of work; they sum up to `step_ms`.
        operations: those that can be replayed, the longest first.
        host_ms: how long the host works in a step.
        half_matrix_ratio: time of the matrix work in half over that in FP32, once measured.
    """

    device: torch.device
    step_ms: float
    ms: dict[str, float]
    operations: list[Operation]
    steppers: list[Stepper]
    steps: int
    loading: Loading | None
    host_ms: float
    half_matrix_ratio: float | None = None

    def advice(
        self, title: str, how: str, saved_ms: float, basis: str, *, of_device: bool = False
    ) -> Iterable[Advice]:
        """The advice, if it pays. Shorter kernels (`of_device`) leave the host's work as it is."""
        left = self.step_ms - saved_ms
        if of_device and self.device.type == "cuda":
            left = max(left, min(self.host_ms, self.step_ms))
        gain = self.step_ms / max(left, 0.01 * self.step_ms)
        if gain >= LEAST_GAIN:
            yield Advice(title, how, gain, basis)


def all_advice(case: Case) -> list[Advice]:
    """What pays, in the order of gain. Runs for up to a minute."""
    found: list[Advice] = []
    for give in (_data, _types_and_layouts, _optimizer, _batch_norm, _launches, _waits, _casts):
        with contextlib.suppress(torch.OutOfMemoryError):  # beside the training, what is left
            found += give(case)
    return sorted(found, key=lambda one: -one.gain)


def half_type(device: torch.device) -> tuple[torch.dtype, str, str]:
    """The half type for `device`, its name, and the level of ampfuse.amp that computes in it."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return torch.float16, "FP16", "O2"
    return torch.bfloat16, "BF16", "O5"


def half_limit(case: Case) -> tuple[float, str]:
    """How much half precision can gain at most, by Amdahl's law, and why; after all_advice."""
    full = [op for op in case.operations if precision(op.event) not in HALVES]
    matrix = sum(op.ms for op in full if op.kind == "matrix")
    memory = sum(op.ms for op in full if op.kind in ("memory", "norm"))
    ratio = case.half_matrix_ratio
    gained = matrix * (1 - min(1.0, ratio or 0.0)) + memory / 2
    limit = case.step_ms / max(case.step_ms - gained, 0.01 * case.step_ms)
    if case.ms["matrix"] > 2 * matrix:
        return limit, f"At most {limit:.2f}x more from half precision: the matrix work is in half."
    other = f"{1 - matrix / case.step_ms:.0%} of the time is not matrix work"
    if ratio is not None:
        other += (
            f"; matrix work in {half_type(case.device)[1]} takes {ratio:.2f} of its time (measured)"
        )
    return limit, f"At most {limit:.2f}x from half precision: {other}."


def _data(case: Case) -> Iterable[Advice]:
    wait, loading = case.ms.get("data", 0.0), case.loading
    title, rest = "load data in the background", case.step_ms - wait
    if loading is None:
        how = "prepare batches in a torch.utils.data.DataLoader with num_workers, not in the loop"
        yield from case.advice(title, how, wait, "at most")
        return
    cores, busy_ms = hardware.core_count(), loading.busy_s * 1e3 / case.steps
    load_ms = loading.workers * case.step_ms or wait  # of one batch, in one process
    busy = min(1.0, busy_ms / max(load_ms, 1e-3))
    # Work of the CPU takes cores, from a training on the CPU too; waiting for files does not.
    most = 4 * cores if 0 < busy < 0.5 else cores
    workers = max(1, min(math.ceil(load_ms / max(rest, 1e-3)) + 1, most))
    if workers <= loading.workers:
        how = f"cheaper transforms: {loading.workers} workers do not keep up on {cores} cores"
        yield from case.advice(title, how, wait, "at most")
        return
    takes = not loading.workers and case.device.type == "cpu" and torch.get_num_threads() >= cores
    left = max(rest + (busy_ms / cores if takes else 0.0), load_ms / workers)
    pin = ", pin_memory=True" if case.device.type == "cuda" and not loading.pinned else ""
    how = f"DataLoader(num_workers={workers}, persistent_workers=True{pin})"
    if workers > cores:
        how += f": more than the {cores} cores, as loading waits {1 - busy:.0%} of its time"
    elif workers == most:
        how += f": as many as there are cores, which loading keeps busy {busy:.0%} of its time"
    basis = "at most" if loading.workers else "measured"
    yield from case.advice(title, how, case.step_ms - left, basis)


def _types_and_layouts(case: Case) -> Iterable[Advice]:
    """Half precision, channels_last, both; matrices of better sizes; TF32."""
    half, name, level = half_type(case.device)
    variants: dict[str, Callable[[Operation], Operation | None]] = {
        "half": lambda op: _changed(op, to_dtype(half, op.kind)),
    }
    # Vectors gain so little by it that the estimate is noise; matrix units take whole tiles.
    if case.device.type == "cuda" or "amx_bf16" in hardware.cpu_flags():
        variants["sizes"] = lambda op: (
            _changed(op, pad_to(multiple_for(op, case.device))) if op.name in _GEMMS else None
        )
    if any("conv" in op.name and _changed(op, to_channels_last) for op in case.operations):
        variants["images"] = lambda op: _changed(op, to_channels_last)
        variants["both"] = lambda op: _changed(
            op, lambda given: to_channels_last(to_dtype(half, op.kind)(given))
        )
    highest = torch.get_float32_matmul_precision() == "highest"
    if case.device.type == "cuda" and half == torch.bfloat16 and highest:
        variants["tf32"] = lambda op: _in_tf32(op) if op.kind == "matrix" else None
    saved = {"images": 0.0, "both": 0.0} | _savings(case, variants)
    amp = f'model, optimizer = amp.initialize(model, optimizer, opt_level="{level}")'
    last = "model.to(memory_format=torch.channels_last), and the images too"
    title, how, best = f"{name} ({level})", amp, "half"
    if case.step_ms - saved["both"] < 0.95 * (case.step_ms - max(saved["half"], saved["images"])):
        title, how, best = f"{title} and channels_last", f"{amp}; {last}", "both"
    # Half precision has to pay in the operations; the optimizer it brings is to be had alone.
    full = (op for op in case.operations if precision(op.event) not in HALVES)
    matrix = sum(op.ms for op in full if op.kind == "matrix")
    if matrix > 0.1 * case.step_ms and any(case.advice(title, how, saved[best], "measured")):
        saved[best] += _optimizer_saving(case, half)
        yield from case.advice(title, how, saved[best], "measured", of_device=True)
    yield from case.advice("channels_last", last, saved["images"], "measured", of_device=True)
    shapes = "pad the sizes in the notes to the next multiple"
    sizes = saved.get("sizes", 0.0)
    yield from case.advice("aligned matrices", shapes, sizes, "measured", of_device=True)
    tf32 = 'torch.set_float32_matmul_precision("high")'
    yield from case.advice("TF32", tf32, saved.get("tf32", 0.0), "measured", of_device=True)


def multiple_for(op: Operation, device: torch.device) -> int:
    """Sizes of matrices should be multiples of this.

    16 bytes on a GPU; on the CPU a row of an AMX tile, 64 bytes, or 16 numbers for a vector.
    """
    size = op.inputs[0].dtype.itemsize
    if device.type == "cuda":
        return max(1, 16 // size)
    return 64 // size if "amx_bf16" in hardware.cpu_flags() else 16


def misaligned(op: Operation, device: torch.device) -> list[int]:
    """The sizes in `op`, a product of matrices, that are not multiples, but larger than one."""
    multiple = multiple_for(op, device)
    sizes = {size for given in op.inputs for size in given.dims[-2:]}
    return sorted(size for size in sizes if size > multiple and size % multiple)


def _changed(op: Operation, change: Callable[[Input], Input]) -> Operation | None:
    other = op.with_inputs(change)
    return None if other.arguments == op.arguments else other


def _savings(
    case: Case, variants: dict[str, Callable[[Operation], Operation | None]]
) -> dict[str, float]:
    """Milliseconds of a step that each of `variants` saves, from replays of what takes longest."""
    begin = time.perf_counter()
    saved = {name: dict.fromkeys(("matrix", "memory", "norm"), 0.0) for name in variants}
    seen = dict.fromkeys(("matrix", "memory", "norm"), 0.0)
    whole, full = dict.fromkeys(seen, 0.0), 0.0
    for place, op in enumerate(op for op in case.operations if op.kind in seen):
        whole[op.kind] += op.ms
        late = time.perf_counter() - begin > _BUDGET_S
        if place >= _MOST_OPERATIONS or late or op.ms < 0.002 * case.step_ms:
            continue
        changed = {name: other for name, vary in variants.items() if (other := vary(op))}
        ratios = speed_ratios(op, list(changed.values()), case.device) if changed else []
        seen[op.kind] += op.ms
        for name, ratio in zip(changed, ratios, strict=True):
            if ratio is not None:
                saved[name][op.kind] += op.ms * (1 - ratio)
                full += op.ms if (name, op.kind) == ("half", "matrix") else 0.0
    if full:
        case.half_matrix_ratio = 1 - saved["half"]["matrix"] / full
    # What was not replayed gains as the rest of its kind, if that is most of it.
    more = {kind: whole[kind] / ms if 2 * ms > whole[kind] else 1.0 for kind, ms in seen.items()}
    return {name: sum(ms * more[kind] for kind, ms in of.items()) for name, of in saved.items()}


def _optimizer(case: Case) -> Iterable[Advice]:
    names = " and ".join(dict.fromkeys(s.cls.__name__ for s in case.steppers if s.cls in FUSED))
    how = f"ampfuse.optim.{names}, or opt_level O0: one pass over all parameters"
    yield from case.advice("fused optimizer", how, _optimizer_saving(case, None), "measured")


def _optimizer_saving(case: Case, half: torch.dtype | None) -> float:
    """Milliseconds that ampfuse's optimizers save in a step, on weights in `half` with masters."""
    saved = 0.0
    for stepper in case.steppers:
        fused: Any = FUSED.get(stepper.cls)
        if fused is None or any(dtype != torch.float32 for _, dtype, _ in stepper.tensors):
            continue
        options = dict(stepper.defaults)
        if stepper.cls is torch.optim.AdamW:
            options.pop("decoupled_weight_decay", None)  # its own constant, no argument
        own = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
        for_ours = {name: own.get(name, value) for name, value in options.items()}
        params = _stepped(stepper, torch.float32)
        now = stepper.cls(params, **options)
        ours = fused(
            _stepped(stepper, half or torch.float32), **for_ours, master_weights=half is not None
        )
        before, after = race([now.step, ours.step], case.device)
        share = sum(stepper.seconds) / sum(sum(each.seconds) for each in case.steppers)
        if case.device.type == "cpu":
            # In the script torch's temporaries may be fresh pages each time, here they are not.
            part = sum(p.numel() for p in params) / sum(s.numel() for s, *_ in stepper.tensors)
            before = max(before, part * statistics.median(stepper.seconds) * 1e3)
        saved += share * case.ms.get("optimizer", 0.0) * (1 - after / before)
    return saved


def _stepped(stepper: Stepper, dtype: torch.dtype) -> list[Tensor]:
    """Parameters like those of `stepper`, with gradients; the first of very many."""
    left = _MOST_ELEMENTS
    params: list[Tensor] = []
    for size, _, device in stepper.tensors:
        if (left := left - size.numel()) >= 0 or not params:
            params.append(torch.rand(size, device=device, dtype=dtype).requires_grad_())
            params[-1].grad = torch.rand_like(params[-1])
    return params


def _batch_norm(case: Case) -> Iterable[Advice]:
    """BatchNorm and ReLU in one pass, on the script's shapes, forward and backward."""
    relus = {
        op.inputs[0].dims
        for op in case.operations
        if op.name in ("aten::clamp_min", "aten::clamp_min_", "aten::relu", "aten::relu_")
    }
    saved, seen = 0.0, 0
    for op in case.operations:
        if op.name.endswith(("native_batch_norm", "cudnn_batch_norm")) and seen < 8:
            image, seen = op.inputs[0], seen + 1
            if image.dims in relus and image.is_image and image.strides[1] == 1:
                before, after = race(
                    [_norm_pass(image, case.device, fused) for fused in (False, True)], case.device
                )
                saved += (before - after) * op.calls
    how = "ampfuse.nn.fuse(model), or amp.initialize(..., fuse_batchnorm=True)"
    yield from case.advice("fused BatchNorm and ReLU", how, saved, "measured", of_device=True)


def _norm_pass(image: Input, device: torch.device, fused: bool) -> Callable[[], object]:
    x = image.make(device).requires_grad_()
    weight = torch.rand(image.dims[1], device=device, requires_grad=True)
    mean, var = torch.zeros_like(weight).detach(), torch.ones_like(weight).detach()
    grad = image.make(device)

    def run() -> None:
        if fused:
            y: Tensor = batch_norm_act(x, mean, var, weight, weight, True, activation="relu")
        else:
            y = torch.relu(torch.batch_norm(x, weight, weight, mean, var, True, 0.1, 1e-5, True))
        torch.autograd.grad(y, (x, weight), grad)

    return run


def _launches(case: Case) -> Iterable[Advice]:
    on_gpu = case.device.type == "cuda"
    title = "one launch for a whole step" if on_gpu else "fewer and larger operations"
    how = "ampfuse.graphs.make_graphed_step(model, loss_fn, optimizer, batch): a CUDA graph"
    how = how if on_gpu else "larger batches; torch.compile(model)"
    yield from case.advice(title, how, case.ms.get("host", 0.0), "at most")
    how = "the script's own Python (numpy, logging, files) holds up the step: move it out of it"
    yield from case.advice("less Python in a step", how, case.ms.get("python", 0.0), "at most")


def _waits(case: Case) -> Iterable[Advice]:
    if case.device.type == "cuda":
        how = "keep numbers on the device, read them every hundred steps; the lines are below"
        yield from case.advice("no waiting for the GPU", how, case.ms.get("sync", 0.0), "at most")
    how = "overlap it with the backward pass (DistributedDataParallel), or send half precision"
    yield from case.advice("less communication", how, case.ms.get("communication", 0.0), "at most")


def _casts(case: Case) -> Iterable[Advice]:
    shapes = {tuple(size) for stepper in case.steppers for size, *_ in stepper.tensors}
    casts = [op for op in case.operations if op.kind == "cast"]
    weights = sum(op.ms for op in casts if op.inputs[0].dims in shapes)
    level = half_type(case.device)[2]
    how = f"opt_level {level} keeps weights in half precision; autocast casts them in every step"
    yield from case.advice("no casts of weights", how, weights, "at most", of_device=True)
    how = "keep tensors in one type from the model's input to its output"
    others = case.ms.get("cast", 0.0) - weights
    yield from case.advice("fewer casts", how, others, "at most", of_device=True)
    how = "keep images in one memory format, call .contiguous() once and not in each step"
    layouts = case.ms.get("layout", 0.0)
    yield from case.advice("fewer transpositions", how, layouts, "at most", of_device=True)


def _in_tf32(op: Operation) -> Operation:
    def call(*args: Any, **kwargs: Any) -> Any:
        torch.set_float32_matmul_precision("high")
        try:
            return op.overload(*args, **kwargs)
        finally:
            torch.set_float32_matmul_precision("highest")

    return replace(op, overload=call)
