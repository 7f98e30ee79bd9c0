"""A profile that torch exported for Chrome's viewer: times by kinds of work, in microseconds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ampfuse import hardware

# The doctor's annotations: the end of each "Optimizer.step#...", and the closure it was given.
STEP, CLOSURE = "ampfuse.doctor step", "ampfuse.doctor closure"
_HOST = frozenset({"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"})
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_INPUTS = ("Input Dims", "Input Strides", "Input type", "Concrete Inputs")

# The kinds of work by their names in tables, in the order of tables and colours.
LABELS = {
    "data": "waiting for data",
    "python": "Python between operations",
    "host": "launching operations",
    "sync": "synchronizing with the device",
    "matrix": "matrix work",
    "norm": "normalisation",
    "reduction": "softmax, losses, sums",
    "memory": "element-wise work and copies",
    "cast": "casts between types",
    "layout": "changes of layout",
    "optimizer": "optimizer",
    "scaling": "loss scaling",
    "communication": "communication",
}
_MATRIX = (
    r"(addmm|mm|bmm|baddbmm|addbmm|mv|addmv|dot|_addmm_activation|_(scaled|grouped|int)_mm|"
    r"mkldnn_(linear|convolution|rnn)\w*|convolution_backward\w*|(cudnn|miopen)_(conv|depthwise)\w*|"
    r"_(cudnn|miopen)_rnn\w*|_thnn_fused\w*|_?(slow|thnn)_conv\w*|_conv_depthwise\w*|"
    r"_nnpack_spatial_convolution|_scaled_dot_product\w*|_(flash|efficient|cudnn)_attention\w*)"
)
# The first that matches the whole name decides.
_NAMES = [
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("data", r"enumerate\(DataLoader\).*"),
        ("optimizer", re.escape(STEP) + r"|Optimizer\.step#.*"),
        ("sync", r"aten::(item|_local_scalar_dense|is_nonzero)|cuda\w*Synchronize"),
        ("scaling", r"aten::_amp_\w+"),
        ("communication", r"(c10d|nccl|gloo|ucc|mpi)\b.*|.*nccl.*Kernel.*"),
        ("host", r"aten::(empty\w*|resize_|view|as_strided\w*|expand|t)"),
        ("matrix", rf"aten::{_MATRIX}|(?!aten)\w+::\w*(conv|gemm|linear|attention)\w*"),
        ("norm", r"\w+::_?\w*(batch|layer|group|instance|rms)_norm\w*"),
        (
            "reduction",
            r"aten::(_?(log_)?softmax\w*|\w*_loss\w*|_log_softmax\w*|sum|mean|max|min|amax|amin|"
            r"argmax|argmin|var\w*|std\w*|norm|linalg_vector_norm|logsumexp|cumsum|topk|sort)"
            r"|aten::_softmax_backward_data|aten::binary_cross_entropy\w*",
        ),
        (
            "memory",
            r"(?!autograd|torch)\w+::.*|Torch-Compiled.*|## Call Compiled.*|graph_\d+_.*"
            r"|Optimizer\.zero_grad#.*",
        ),
    )
]
# All events inside of these count as theirs, except a closure.
_ENCLOSING = frozenset({"data", "optimizer", "communication"})
_MATRIX_KERNEL = re.compile(r"gemm|cutlass|conv|wgrad|dgrad|fprop|xmma|attention|flash|nvjet", re.I)
_TENSOR_CORES = re.compile(r"tf32|1688|16816|884|hmma|wgmma|tensorop|xmma|flash|nvjet|sm90", re.I)
_PRECISIONS = {
    "double": "FP64",
    "float": "FP32",
    "c10::Half": "FP16",
    "c10::BFloat16": "BF16",
    "c10::Float8_e4m3fn": "FP8",
    "c10::Float8_e5m2": "FP8",
}
HALVES = frozenset({"FP16", "BF16"})
_TRANSFERS = frozenset({"communication", "data", "sync"})  # by a device, while it does other work


@dataclass(slots=True, eq=False)
class Event:
    """An operation, annotation, call of the CUDA runtime, or kernel.

    `dims`, `strides`, `types` and `values` have one entry for each input. A kernel has the number
    `operation` of the operation that launched it, and `launch` of the call of the CUDA runtime.
    `parent` is the event around it on its thread; of a kernel, that operation, or without one (as
    ampfuse's optimizers launch theirs) what is around the call.
    """

    name: str
    category: str = "cpu_op"
    start: float = 0.0
    end: float = 0.0
    thread: object = 0
    dims: list[Any] = field(default_factory=list)
    strides: list[Any] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    operation: object = None
    launch: object = None
    parent: Event | None = None
    self_us: float = 0.0
    kind: str = ""

    @property
    def precision(self) -> str:
        """The type of the first input that is not an integer ("FP32"); "" if there is none. A
        kernel has that of its operation, or "TF32" where its name says so."""
        types = (self if self.types or self.parent is None else self.parent).types
        first = next((_PRECISIONS[name] for name in types if name in _PRECISIONS), "")
        return "TF32" if first == "FP32" and "tf32" in self.name.lower() else first

    @property
    def units(self) -> str:
        """The units that compute its matrix work, as text."""
        if self.category == "kernel":
            on = self.precision in HALVES | {"TF32", "FP8"} and _TENSOR_CORES.search(self.name)
            return "tensor cores" if on else "no tensor cores"
        flag = {"BF16": "amx_bf16", "FP16": "amx_fp16"}.get(self.precision)
        return "AMX" if flag in hardware.cpu_flags() else "no matrix units"


@dataclass
class Operation:
    """Calls of one operation with equal inputs, such as those of `event`, in a step."""

    event: Event
    kind: str
    calls: float = 0.0
    ms: float = 0.0

    @property
    def shapes(self) -> str:
        """The sizes of the tensors that it was given: ``"100x509, 509x1021"``."""
        dims = (dims for dims in self.event.dims if dims and all(isinstance(n, int) for n in dims))
        return ", ".join("x".join(map(str, sizes)) for sizes in dims)


class Profile:
    """Sums of the profiled steps, each from one optimizer step's end to the next.

    On the CPU time is what the thread of the training does: the innermost operation, or Python
    between operations. On a GPU it is what the GPU does; while it idles it waits for the host, and
    in that for data as long as the DataLoader takes.

    Arguments:
        records: the ``traceEvents`` of a trace, with the ends of two or more optimizer steps.

    Attributes:
        host: the events that begin in these steps, in order, and `device` those of the device.
        steps: how many there are.
        duration: microseconds of all steps.
        times: the same by kind and, of matrix work, precision and units.
        operations: those of a step, with their time under the profiler, longest first.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        self.host, self.device = _read(records)
        marks = [event for event in self.host if event.name == STEP]
        self.steps = len(marks) - 1
        begin, end = marks[0].end, marks[-1].end
        self.duration = end - begin
        for event in self.host:
            event.kind = _kind(event)
        for event in self.device:
            event.kind = _kind_on_device(event)
        _share_time(self.device)
        self.host, self.device = (
            [event for event in events if begin <= event.start < end]
            for events in (self.host, self.device)
        )
        for event in (*self.host, *self.device):
            event.self_us = max(event.self_us - max(event.end - end, 0.0), 0.0)
        self.times: dict[tuple[str, str], float] = defaultdict(float)
        thread = marks[0].thread
        counted = self.device or [event for event in self.host if event.thread == thread]
        self.operations = self._sum(counted)
        rest = self.duration - sum(self.times.values())
        if self.device:
            loading = sum(event.self_us for event in self.host if event.kind == "data")
            self.times["data", ""] += min(rest, loading)
            self.times["host", ""] += max(rest - loading, 0.0)
        else:
            self.times["python", ""] += rest

    def _sum(self, events: Iterable[Event]) -> list[Operation]:
        """Add the events to the times; return their operations."""
        operations: dict[str, Operation] = {}
        for event in events:
            detail = f"{event.precision or 'integers'}, {event.units}"
            self.times[event.kind, detail if event.kind == "matrix" else ""] += event.self_us
            if event.kind not in ("host", "data", "python") and event.name != STEP:
                source = event.parent if event.category == "kernel" and event.parent else event
                inputs = source.name, source.dims, source.strides, source.types, event.kind
                op = operations.setdefault(repr(inputs), Operation(source, event.kind))
                op.ms += event.self_us / 1e3 / self.steps
                op.calls += 1 / self.steps
        return sorted(operations.values(), key=lambda op: -op.ms)


def _read(records: Iterable[Mapping[str, Any]]) -> tuple[list[Event], list[Event]]:
    """The events of the host and of the device, by start; with parents and times of their own."""
    host: list[Event] = []
    device: list[Event] = []
    for record in records:
        category = record.get("cat", "")
        if category in _HOST | _DEVICE:
            start = float(record["ts"])
            end = start + float(record.get("dur", 0))
            facts = record.get("args", {})
            inputs = (facts.get(name, []) for name in _INPUTS)
            event = Event(record["name"], category, start, end, record.get("tid", 0), *inputs)
            event.operation, event.launch = facts.get("External id"), facts.get("correlation")
            (device if category in _DEVICE else host).append(event)
    for events in (host, device):
        events.sort(key=lambda event: (event.start, -event.end))
    open_on: dict[object, list[Event]] = defaultdict(list)
    for event in host:
        event.self_us = event.end - event.start
        stack = open_on[event.thread]
        while stack and stack[-1].end <= event.start:
            stack.pop()
        if stack:
            event.parent = stack[-1]
            event.parent.self_us -= min(event.end, event.parent.end) - event.start
        stack.append(event)
    operations = {event.operation: event for event in host if event.category == "cpu_op"}
    launches = {event.launch: event.parent for event in host if event.launch is not None}
    for event in device:
        if event.operation is not None:
            event.parent = operations.get(event.operation)
        event.parent = event.parent or launches.get(event.launch)
    return host, device


def _share_time(device: Iterable[Event]) -> None:
    """Count time in which several streams work once: for what began first, transfers last."""
    active: list[Event] = []
    before = 0.0
    edges = [(event.start, event) for event in device] + [(event.end, event) for event in device]
    for now, event in sorted(edges, key=lambda edge: edge[0]):
        if active:
            first = min(active, key=lambda other: other.kind in _TRANSFERS)
            first.self_us += now - before
        before = now
        if event in active:
            active.remove(event)
        else:
            active.append(event)


def _by_name(event: Event) -> str:
    """The kind that the name alone implies; "host" if it implies none, as for autograd's nodes."""
    if event.name != "aten::copy_":
        return next((kind for kind, names in _NAMES if names.fullmatch(event.name)), "host")
    if len(event.types) > 1 and event.types[0] != event.types[1]:
        return "cast"
    if len(event.strides) > 1 and event.dims[0] == event.dims[1]:
        pairs = (zip(event.strides[i], event.dims[i], strict=True) for i in (0, 1))
        target, source = ([stride for stride, dim in pair if dim > 1] for pair in pairs)
        # Strides of 0 are an expansion (of a bias, say), not a transposition.
        if target != source and 0 not in source:
            return "layout"
    return "memory"


def _kind(event: Event) -> str:
    """The kind of the time that the host spends in `event` itself; its parent's kind is set."""
    if event.parent and event.parent.kind in _ENCLOSING and event.name != CLOSURE:
        return event.parent.kind
    kind = _by_name(event)
    if event.category == "user_annotation" and kind == "host":
        return "python"  # of the script, in an annotation of it
    if kind == "memory" and event.self_us < (event.end - event.start) / 2:
        return "host"  # it calls others that do the work
    return kind


def _kind_on_device(event: Event) -> str:
    """The kind of a kernel or a copy: that of the operation that launched it."""
    if re.search("nccl", event.name, re.I):
        return "communication"
    if event.category == "gpu_memcpy" and "DtoD" not in event.name:
        return "data" if "HtoD" in event.name else "sync"
    if event.parent and event.parent.kind in _ENCLOSING:
        return event.parent.kind
    kind = _by_name(event.parent) if event.parent else "host"
    if kind in ("host", "sync"):
        return "matrix" if _MATRIX_KERNEL.search(event.name) else "memory"
    return kind
