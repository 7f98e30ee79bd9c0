"""Which kind of work an operation or a kernel is, in which precision, on which units."""

from __future__ import annotations

import re

from ampfuse import hardware
from ampfuse.doctor.trace import CLOSURE, STEP, Event

# What kinds of work are called, in the order of tables and colours.
LABELS = {
    "data": "waiting for data",
    "python": "Python without torch",
    "host": "launching operations",
    "sync": "waiting for the device",
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
# What is inside these belongs to them, whatever it is; but for the closure of an optimizer's step.
ENCLOSING = frozenset({"data", "optimizer", "communication"})

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
        ("memory", r"(?!autograd|torch)\w+::.*|Torch-Compiled.*|## Call Compiled.*|graph_\d+_.*"),
        ("memory", r"Optimizer\.zero_grad#.*"),
    )
]
_MATRIX_KERNEL = re.compile(r"gemm|cutlass|conv|wgrad|dgrad|fprop|xmma|attention|flash|nvjet", re.I)
_TENSOR_CORES = re.compile(r"tf32|1688|16816|884|hmma|wgmma|tensorop|xmma|flash|nvjet|sm90", re.I)

# By a profile's names of the types of tensors.
_PRECISIONS = {
    **{"double": "FP64", "float": "FP32", "c10::Half": "FP16", "c10::BFloat16": "BF16"},
    **{"c10::Float8_e4m3fn": "FP8", "c10::Float8_e5m2": "FP8"},
}
HALVES = frozenset({"FP16", "BF16"})


def kind_by_name(event: Event) -> str:
    """The kind that the name alone says; "host" where it says nothing, as for autograd's nodes."""
    if event.name == "aten::copy_":
        return _kind_of_copy(event)
    return next((kind for kind, names in _NAMES if names.fullmatch(event.name)), "host")


def kind_on_host(event: Event) -> str:
    """The kind of the time that the host spends in `event` itself; its parent's kind is set."""
    if event.parent and event.parent.kind in ENCLOSING and event.name != CLOSURE:
        return event.parent.kind
    kind = kind_by_name(event)
    if kind == "memory" and event.self_us < event.duration / 2:
        return "host"  # it calls others that do the work
    return kind


def kind_on_device(event: Event) -> str:
    """The kind of a kernel or a copy: that of the operation that launched it."""
    if re.search("nccl", event.name, re.I):
        return "communication"
    if event.category == "gpu_memcpy" and "DtoD" not in event.name:
        return "data" if "HtoD" in event.name else "sync"
    if event.parent and event.parent.kind in ENCLOSING:
        return event.parent.kind
    kind = kind_by_name(event.parent) if event.parent else "host"
    if kind in ("host", "sync"):
        return "matrix" if _MATRIX_KERNEL.search(event.name) else "memory"
    return kind


def precision(event: Event) -> str:
    """The type of the first input that is no integer ("FP32"); "" if there is none.

    Of a kernel: that of its operation, and "TF32" where the kernel's name says so.
    """
    operation = event if event.types or event.parent is None else event.parent
    found = next((_PRECISIONS[name] for name in operation.types if name in _PRECISIONS), "")
    return "TF32" if found == "FP32" and "tf32" in event.name.lower() else found


def units(event: Event) -> str:
    """What computes the matrix work of `event`, in words."""
    kind = precision(event)
    if event.category == "kernel":
        on = kind in HALVES | {"TF32", "FP8"} and _TENSOR_CORES.search(event.name)
        return "tensor cores" if on else "no tensor cores"
    flags = hardware.cpu_flags()
    if {"BF16": "amx_bf16", "FP16": "amx_fp16"}.get(kind, "none") in flags:
        return "AMX"
    return "no matrix units"


def _kind_of_copy(event: Event) -> str:
    """A copy to another dtype, to another order in memory, or a plain one."""
    if len(event.types) > 1 and event.types[0] != event.types[1]:
        return "cast"
    if len(event.strides) > 1 and event.dims[0] == event.dims[1]:
        target, source = ([s for s, d in zip(event.strides[i], event.dims[i], strict=True) if d > 1]
                          for i in (0, 1))  # fmt: skip
        # Strides of 0 are an expansion (of a bias, say), which is no transposition.
        if target != source and 0 not in source:
            return "layout"
    return "memory"
