"""What would make the step faster, and by how much: measured on the script's own shapes.

Each rule is a row of `RULES`: what to do, where it applies, and how many milliseconds it saves.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampfuse import hardware
from ampfuse.doctor.kinds import HALVES, precision
from ampfuse.doctor.replay import Operation, race, speed_ratios, to_channels_last, to_dtype
from ampfuse.doctor.watch import Loading, Stepper
from ampfuse.insight.findings import Finding
from ampfuse.insight.hints import machine
from ampfuse.optim.fused import FUSED

LEAST_GAIN = 1.05  # below that, noise decides
_BUDGET_S = 30.0
_MOST_OPERATIONS = 24
_MOST_ELEMENTS = 50_000_000  # of parameters that are stepped to time an optimizer
_REPLAYED = ("matrix", "memory", "norm")
_NOT_OURS = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}


@dataclass
class Case:
    """What is known of a script's step.

    Attributes:
        ms: by kind of work; they sum up to `step_ms`.
        operations: those that can be replayed, the longest first.
        host_ms: how long the host works in a step.
    """

    device: torch.device
    step_ms: float
    ms: dict[str, float]
    operations: list[Operation]
    steppers: list[Stepper]
    steps: int
    loading: Loading | None
    host_ms: float

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def half(self) -> tuple[torch.dtype, str, str]:
        """The half type for the device, its name, and the level of ampfuse.amp that uses it."""
        if machine(self.device).has_bf16 or not self.on_gpu:
            return torch.bfloat16, "BF16", "O5"
        return torch.float16, "FP16", "O2"

    def full_ms(self, *kinds: str) -> float:
        """Of operations of `kinds` that are not in half precision."""
        full = (op for op in self.operations if precision(op.event) not in HALVES)
        return sum(op.ms for op in full if op.kind in kinds)

    @property
    def weight_casts_ms(self) -> float:
        shapes = {tuple(size) for stepper in self.steppers for size, *_ in stepper.tensors}
        casts = (op for op in self.operations if op.kind == "cast")
        return sum(op.ms for op in casts if op.inputs[0].dims in shapes)

    @cached_property
    def replays(self) -> tuple[dict[str, float], float | None]:
        """Milliseconds that each variant saves; time of the matrix work in half over FP32's."""
        return _replays(self)

    def gain(self, saved_ms: float, of_device: bool = False) -> float:
        """Of the whole step. Shorter kernels (`of_device`) leave the host's work as it is."""
        left = self.step_ms - saved_ms
        if of_device and self.on_gpu:
            left = max(left, min(self.host_ms, self.step_ms))
        return self.step_ms / max(left, 0.01 * self.step_ms)


class Change(NamedTuple):
    """What to do, how, and how many milliseconds of a step it saves.

    Attributes:
        basis: "measured" on the script's shapes here, or "at most", if what it removes costs
            nothing more.
        of_device: it makes kernels shorter, and leaves the host's work as it is.
        on: the one type of device that it is for; "" if for all.
    """

    what: str
    remedy: str
    saved_ms: Callable[[Case], float]
    basis: str = "at most"
    of_device: bool = False
    on: str = ""


def _of(kind: str) -> Callable[[Case], float]:
    return lambda case: case.ms.get(kind, 0.0)


def _replayed(variant: str) -> Callable[[Case], float]:
    return lambda case: case.replays[0].get(variant, 0.0)


_LAST = "model.to(memory_format=torch.channels_last), and the images too"


def _data(case: Case) -> Change:
    """A DataLoader, with as many workers as there is work for."""
    what, wait, loading = "load data in the background", case.ms.get("data", 0.0), case.loading
    if loading is None:
        how = "prepare batches in a torch.utils.data.DataLoader with num_workers, not in the loop"
        return Change(what, how, _of("data"))
    cores, busy_ms = hardware.core_count(), loading.busy_s * 1e3 / case.steps
    rest, load_ms = case.step_ms - wait, loading.workers * case.step_ms or wait  # of one batch
    busy = min(1.0, busy_ms / max(load_ms, 1e-3))
    # Work of the CPU takes cores, from a training on the CPU too; waiting for files does not.
    most = 4 * cores if 0 < busy < 0.5 else cores
    workers = max(1, min(math.ceil(load_ms / max(rest, 1e-3)) + 1, most))
    if workers <= loading.workers:
        how = f"cheaper transforms: {loading.workers} workers do not keep up on {cores} cores"
        return Change(what, how, _of("data"))
    takes = not loading.workers and not case.on_gpu and torch.get_num_threads() >= cores
    left = max(rest + (busy_ms / cores if takes else 0.0), load_ms / workers)
    pin = ", pin_memory=True" if case.on_gpu and not loading.pinned else ""
    how = f"DataLoader(num_workers={workers}, persistent_workers=True{pin})"
    if workers > cores:
        how += f": more than the {cores} cores, as loading waits {1 - busy:.0%} of its time"
    elif workers == most:
        how += f": as many as there are cores, which loading keeps busy {busy:.0%} of its time"
    basis = "at most" if loading.workers else "measured"
    return Change(what, how, lambda case: case.step_ms - left, basis)


def _half(case: Case) -> Change:
    """Half precision, with channels_last if both together gain more than the better of them."""
    (dtype, name, level), (saved, _) = case.half, case.replays
    what = f"{name} ({level})"
    how = f'model, optimizer = amp.initialize(model, optimizer, opt_level="{level}")'
    best, both, images = saved["half"], saved.get("both", 0.0), saved.get("images", 0.0)
    if case.step_ms - both < 0.95 * (case.step_ms - max(best, images)):
        what, how, best = f"{what} and channels_last", f"{how}; {_LAST}", both
    # It has to pay in the operations; the optimizer it brings is to be had alone.
    pays = case.full_ms("matrix") > 0.1 * case.step_ms and case.gain(best) >= LEAST_GAIN
    saved_ms = best + _optimizer_saving(case, dtype) if pays else 0.0
    return Change(what, how, lambda case: saved_ms, "measured", of_device=True)


def _fused_optimizer(case: Case) -> Change:
    names = dict.fromkeys(each.cls.__name__ for each in case.steppers if each.cls in FUSED)
    how = f"ampfuse.optim.{' and '.join(names)}, or opt_level O0: one pass over all parameters"
    return Change("fused optimizer", how, lambda case: _optimizer_saving(case, None), "measured")


# Those whose words depend on the case are functions.
# fmt: off
RULES: tuple[Change | Callable[[Case], Change], ...] = (
    _data, _half, _fused_optimizer,
    Change("channels_last", _LAST, _replayed("images"), "measured", True),
    Change("one launch for a whole step", "ampfuse.graphs.make_graphed_step(model, loss_fn, "
           "optimizer, batch): a CUDA graph", _of("host"), on="cuda"),
    Change("fewer and larger operations", "larger batches; torch.compile(model)",
           _of("host"), on="cpu"),
    Change("less Python in a step", "the script's own Python (numpy, logging, files) holds up the "
           "step: move it out of it", _of("python")),
    Change("no waiting for the GPU", "keep numbers on the device, read them every hundred steps; "
           "the lines are below", _of("sync"), on="cuda"),
    Change("less communication", "overlap it with the backward pass (DistributedDataParallel), or "
           "send half precision", _of("communication")),
    Change("no casts of weights", "opt_level O2 or O5 keeps weights in half precision; autocast "
           "casts them in every step", lambda case: case.weight_casts_ms, of_device=True),
    Change("fewer casts", "keep tensors in one type from the model's input to its output",
           lambda case: case.ms.get("cast", 0.0) - case.weight_casts_ms, of_device=True),
    Change("fewer transpositions", "keep images in one memory format, call .contiguous() once and "
           "not in each step", _of("layout"), of_device=True),
)
# fmt: on


def find(case: Case) -> list[Finding]:
    """What pays, in the order of gain. Runs for up to a minute."""
    found = []
    for rule in RULES:
        with contextlib.suppress(torch.OutOfMemoryError):  # beside the training, what is left
            change = rule if isinstance(rule, Change) else rule(case)
            if change.on in ("", case.device.type):
                gain = case.gain(change.saved_ms(case), change.of_device)
                basis = f"{gain:.2f}x {change.basis}"
                if gain >= LEAST_GAIN:
                    found.append(Finding(change.what, change.remedy, found=basis, gain=gain))
    return sorted(found, key=lambda one: -(one.gain or 0.0))


def half_limit(case: Case) -> tuple[float, str]:
    """How much half precision can gain at most, by Amdahl's law, and why."""
    matrix, ratio = case.full_ms("matrix"), case.replays[1]
    gained = matrix * (1 - min(1.0, ratio or 0.0)) + case.full_ms("memory", "norm") / 2
    limit = case.step_ms / max(case.step_ms - gained, 0.01 * case.step_ms)
    if case.ms["matrix"] > 2 * matrix:
        return limit, f"At most {limit:.2f}x more from half precision: the matrix work is in half."
    other = f"{1 - matrix / case.step_ms:.0%} of the time is not matrix work"
    if ratio is not None:
        other += f"; matrix work in {case.half[1]} takes {ratio:.2f} of its time (measured)"
    return limit, f"At most {limit:.2f}x from half precision: {other}."


def shape_notes(case: Case) -> Iterator[Finding]:
    """Sizes that miss alignment, and convolutions of half images with channels first."""
    for op in case.operations:
        if op.kind != "matrix" or op.ms < 0.01 * case.step_ms:
            continue
        where, first, multiple = f"{op.name} {op.shapes}", op.inputs[0], multiple_for(op, case)
        sizes = {size for given in op.inputs for size in given.dims[-2:]}
        odd = sorted(size for size in sizes if size > multiple and size % multiple)
        if odd and op.name.endswith("mm"):
            remedy = f"pad them to multiples of {multiple}"
            yield Finding("sizes", remedy, where, f"{odd} miss alignment ({op.ms:.2f} ms)")
        channels_first = first.is_image and first.strides[1] != 1 != first.dims[1]
        if channels_first and "conv" in op.name and precision(op.event) in HALVES:
            found = "half precision with channels first (NCHW)"
            yield Finding("layout", _LAST, where, found)


# --- replays --------------------------------------------------------------------------------------


def multiple_for(op: Operation, case: Case) -> int:
    """Sizes of matrices should be multiples of this.

    16 bytes on a GPU; on the CPU a row of an AMX tile, 64 bytes, or 16 numbers for a vector.
    """
    size = op.inputs[0].dtype.itemsize
    if case.on_gpu:
        return max(1, 16 // size)
    return 64 // size if "amx_bf16" in hardware.cpu_flags() else 16


def _variants(case: Case) -> dict[str, Callable[[Operation], Operation | None]]:
    """Half precision, channels_last, both."""
    half, images = case.half[0], to_channels_last
    variants: dict[str, Callable[[Operation], Operation | None]] = {
        "half": lambda op: op.with_inputs(to_dtype(half, op.kind))
    }
    if any("conv" in op.name and op.with_inputs(images) for op in case.operations):
        variants["images"] = lambda op: op.with_inputs(images)
        variants["both"] = lambda op: op.with_inputs(to_dtype(half, op.kind), images)
    return variants


def _replays(case: Case) -> tuple[dict[str, float], float | None]:
    """:attr:`Case.replays`, of what takes longest."""
    begin, variants = time.perf_counter(), _variants(case)
    saved = {name: dict.fromkeys(_REPLAYED, 0.0) for name in variants}
    seen, whole, full = dict.fromkeys(_REPLAYED, 0.0), dict.fromkeys(_REPLAYED, 0.0), 0.0
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
    ratio = 1 - saved["half"]["matrix"] / full if full else None
    # What was not replayed gains as the rest of its kind, if that is most of it.
    more = {kind: whole[kind] / ms if 2 * ms > whole[kind] else 1.0 for kind, ms in seen.items()}
    totals = {name: sum(ms * more[kind] for kind, ms in of.items()) for name, of in saved.items()}
    return totals, ratio


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
        params, own = _stepped(stepper, torch.float32), _stepped(stepper, half or torch.float32)
        now = stepper.cls(params, **options)
        options = {name: _NOT_OURS.get(name, value) for name, value in options.items()}
        ours = fused(own, **options, master_weights=half is not None)
        before, after = race([now.step, ours.step], case.device)
        share = sum(stepper.seconds) / sum(sum(each.seconds) for each in case.steppers)
        if not case.on_gpu:
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
