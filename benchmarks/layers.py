"""Norms, activations, convolutions and other operations in half precision, alone.

    python benchmarks/layers.py [--device cuda] [--only norm conv-8 ...] [--quick]

Each case is forward and backward of torch's operations, in a process that never imports ampfuse,
and of the fused one; "copy" is its bytes at the bandwidth of a copy.

norm    a batch norm with its ReLU (and its residual) at the shapes of ResNet-50's layers with a
        batch of 8 (256 on a GPU), as many as fill 96 MiB: one call of a cold process would mostly
        measure how its instructions come from memory. On a GPU "cuDNN" is torch's operations with
        the batch norm by cuDNN, in FP16: torch has kernels of its own for BF16. The bytes:
        csrc/core/nn_ops/batch_norm.h
rows    a residual addition with the layer norm after it, "rms" with an RMS norm, at the widths of
        ConvNeXt-T, ViT-S, GPT-2 and Llama; csrc/core/nn_ops/norm.h
gelu    an activation behind a bias, "gelu_tanh" its other form, "silu" one that is gated, at the
        widths of ViT-S, GPT-2 and Llama; csrc/core/nn_ops/activation.h
loss    the cross-entropy of half logits, of which torch's needs an FP32 copy, for so many words;
        csrc/core/nn_ops/cross_entropy.h

Cases "conv-..." and "op-..." are one operation on the CPU: in FP32 and in half by torch, and in
half with ``ampfuse.cpu_half_ops()``, which runs the convolutions as matrix products (see
csrc/torch/half_conv.cpp). Where torch's half takes many times FP32's time, torch has no half kernel
for that operation on this CPU: what csrc/torch/half_ops.cpp mends. With ONEDNN_MAX_CPU_ISA=AVX2
(AVX512_CORE, ...), oneDNN does as on an older CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from harness.limits import bounds
from harness.measuring import Clock, Variant, Worker, WorkerError, measure
from harness.results import Results, Row, options_of, rows_of
from torch import Tensor

Shape = tuple[int, ...]
Function = Callable[..., Any]

BATCH = {"cpu": 8, "cuda": 256}
# Channels, side of the images.
NORMS = (
    *("norm-64-112", "norm-64-56", "norm-256-56-residual", "norm-128-28", "norm-512-28-residual"),
    *("norm-256-14", "norm-1024-14-residual", "norm-512-7", "norm-2048-7-residual"),
)
# Rows, columns.
ROWS = {
    "rows-96": (25088, 96),
    "rows-384": (1576, 384),
    "rows-768": (8192, 768),
    "rows-4096": (4096, 4096),
    "rms-768": (8192, 768),
    "rms-4096": (4096, 4096),
    "gelu-1536": (1576, 1536),
    "gelu-3072": (8192, 3072),
    "gelu_tanh-3072": (8192, 3072),
    "silu-11008-gated": (2048, 11008),
    "loss-16384": (2048, 16384),
    "loss-131072": (512, 131072),
}
# Batch, channels, filters, side of the images, side of the kernel, stride.
CONVOLUTIONS = (
    *("conv-8-1024-256-14-1-1", "conv-8-1024-2048-14-1-2", "conv-8-2048-512-7-1-1"),
    *("conv-8-512-512-7-3-1", "conv-32-384-192-8-1-1", "conv-32-1000-192-2-1-1"),
    *("conv-32-2000-192-1-1-1", "conv-32-192-48-2-3-1", "conv-64-512-512-4-3-1"),
    "conv-64-512-512-2-3-1",
)
# A function, and the shapes of its inputs; "x" is a batch of images.
OPS: dict[str, tuple[Function, str]] = {
    "conv2d": (partial(F.conv2d, padding=1), "x 32,32,3,3 32"),
    "conv_transpose2d": (partial(F.conv_transpose2d, stride=2), "x 32,32,2,2"),
    "linear": (F.linear, "512,512 1024,512 1024"),
    "matmul": (torch.matmul, "512,512 512,1024"),
    "mv": (torch.mv, "1024,1024 1024"),
    "dot": (torch.dot, "65536 65536"),
    "bmm": (torch.bmm, "64,64,64 64,64,64"),
    "baddbmm": (torch.baddbmm, "64,64,64 64,64,64 64,64,64"),
    "attention": (F.scaled_dot_product_attention, "8,8,128,64 8,8,128,64 8,8,128,64"),
    "batch_norm": (lambda x, g, b: F.batch_norm(x, None, None, g, b, True), "x 32 32"),
    "layer_norm": (lambda x, g, b: F.layer_norm(x, (512,), g, b), "32,64,512 512 512"),
    "amax": (partial(torch.amax, dim=(0, 2, 3)), "x"),
}
# By case: operation and dtype; the small convolutions in BF16 alone.
OPERATIONS = {f"op-{name}-{half}": (name, half) for name in OPS for half in ("bfloat16", "float16")}
OPERATIONS |= {name: (name, "bfloat16") for name in CONVOLUTIONS}


# ---- torch's operations and the fused ones -------------------------------------------------------


def norm(x: Tensor, *others: Tensor) -> Tensor:
    *residual, weight, bias = others
    return _add_relu(F.batch_norm(x, None, None, weight, bias, True), residual)


def cudnn_norm(x: Tensor, *others: Tensor) -> Tensor:
    *residual, weight, bias = others
    y = torch.cudnn_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)[0]
    return _add_relu(y, residual)


def _add_relu(y: Tensor, residual: Sequence[Tensor]) -> Tensor:
    for other in residual:
        y += other
    return F.relu_(y)


def fused_norm(x: Tensor, *others: Tensor) -> Tensor:
    from ampfuse.nn.functional import batch_norm_act

    *residual, weight, bias = others
    options: Any = {"training": True, "activation": "relu", "residual": (*residual, None)[0]}
    return batch_norm_act(x, None, None, weight, bias, **options)


def add_norm(x: Tensor, residual: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    norm: Function = F.rms_norm if len(weights) == 1 else F.layer_norm
    return norm(total, weights[0].shape, *weights), total


def fused_add_norm(x: Tensor, residual: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
    from ampfuse.nn import add_layer_norm, add_rms_norm

    norm: Function = add_rms_norm if len(weights) == 1 else add_layer_norm
    return norm(x, residual, weights[0].shape, *weights)


def act(name: str, x: Tensor, other: Tensor) -> Tensor:
    if name == "silu":
        return F.silu(x) * other
    return F.gelu(x + other, approximate="tanh" if name == "gelu_tanh" else "none")


def fused_act(name: str, x: Tensor, other: Tensor) -> Tensor:
    from ampfuse.nn import bias_act, gated_act

    function: Function = gated_act if name == "silu" else bias_act
    return function(x, other, name)


def loss(x: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), torch.arange(len(x), device=x.device))


def fused_loss(x: Tensor) -> Tensor:
    from ampfuse.nn import cross_entropy

    return cross_entropy(x, torch.arange(len(x), device=x.device))


# ---- cases ---------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """What a case runs: functions by arm, of `inputs` in half and then of `weights`.

    `half_bytes` are read and written for an element of the first input; `count` layers run one
    after another.
    """

    arms: dict[str, Function]
    inputs: Sequence[Shape]
    weights: Sequence[Shape] = ()
    weight_dtype: torch.dtype | None = None  # None: that of the inputs
    half_bytes: float = math.nan
    count: int = 1

    @property
    def elements(self) -> int:
        return self.count * math.prod(self.inputs[0])


def layer_of(case: str, kind: str) -> Layer:
    """On a device of that kind."""
    name, *sizes = case.split("-")
    if name == "norm":
        channels, side = map(int, sizes[:2])
        image, residual = (BATCH[kind], channels, side, side), case.endswith("residual")
        arms = {"torch": norm, "fused": fused_norm, "cuDNN": cudnn_norm}
        # moments, apply, reduce, dx; a residual is read, and its gradient written and read
        half_bytes = 2 * (1 + 2 + 2 + 3 + 2 * residual) + 3 / 8
        count = max(1, (96 << 20) // (2 * math.prod(image)))
        weights = [(channels,)] * 2
        return Layer(arms, [image] * (1 + residual), weights, torch.float32, half_bytes, count)
    if case in ROWS:
        _, columns = shape = ROWS[case]
        if name in ("rows", "rms"):  # forward, backward, weights
            arms = {"torch": add_norm, "fused": fused_add_norm}
            weights = [(columns,)] * (2 if name == "rows" else 1)
            return Layer(arms, [shape] * 2, weights, half_bytes=8 + 8 + 4)
        if name == "loss":
            return Layer({"torch": loss, "fused": fused_loss}, [shape], half_bytes=2 + 4)
        arms = {"torch": partial(act, name), "fused": partial(fused_act, name)}
        gated = case.endswith("gated")
        other, half_bytes = (shape, 6 + 10) if gated else ((columns,), 4 + 6)
        return Layer(arms, [shape, other], half_bytes=half_bytes)
    if name == "conv":
        n, channels, filters, side, kernel, stride = map(int, sizes)
        function = partial(F.conv2d, stride=stride, padding=kernel // 2)
        inputs = [(n, channels, side, side), (filters, channels, kernel, kernel)]
        return Layer({"torch": function}, inputs)
    function, shapes = OPS[OPERATIONS[case][0]]
    texts = shapes.replace("x", "32,32,16,16").split()
    return Layer({"torch": function}, [tuple(map(int, text.split(","))) for text in texts])


class Call:
    """Forward and backward of a case."""

    def __init__(
        self, case: str, arm: str, device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        layer = layer_of(case, device.type)

        def tensor(shape: Shape) -> Tensor:
            x = torch.randn(shape, device=device).mul_(0.1).to(dtype)
            images = torch.channels_last if x.dim() == 4 else torch.contiguous_format
            return x.contiguous(memory_format=images).requires_grad_()

        self.function = layer.arms[arm]
        self.layers = [[tensor(shape) for shape in layer.inputs] for _ in range(layer.count)]
        options: Any = {"device": device, "dtype": layer.weight_dtype or dtype}
        self.weights = [torch.ones(s, **options).requires_grad_() for s in layer.weights]
        self.gradients = [torch.randn_like(output) for output in self.outputs(self.layers[0])]

    def outputs(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        y = self.function(*inputs, *self.weights)
        return (y,) if isinstance(y, Tensor) else y

    def __call__(self) -> None:
        for inputs in self.layers:
            torch.autograd.grad(self.outputs(inputs), [*inputs, *self.weights], self.gradients)


def layer_rows(case: str, options: Any, worker: Worker) -> list[Row]:
    device, kind, clock = options.device, options.device.type, Clock(options.device)
    layer = layer_of(case, kind)
    variants = {
        "torch": worker.variant(Call, case, "torch", device),
        "fused": Variant(clock, Call(case, "fused", device)),
        "copy": bounds(clock, layer.elements, layer.half_bytes)["copy"],
    }
    if kind == "cuda" and "cuDNN" in layer.arms:
        try:
            variants["cuDNN"] = worker.variant(Call, case, "cuDNN", device, torch.float16)
        except WorkerError as error:  # keeps no other from being measured
            print(f"{case:28s} cuDNN: not run ({error})")
    return rows_of(
        device,
        measure(variants, options.repeats),
        case=f"{case}-batch-{BATCH[kind]}" if case in NORMS and kind == "cuda" else case,
        params=layer.elements,
        dtype="bfloat16",
        bytes_per_param=dict.fromkeys(variants, layer.half_bytes),
    )


def operation_rows(case: str, options: Any, worker: Worker) -> list[Row]:
    import ampfuse

    ampfuse.cpu_half_ops()
    half, device = OPERATIONS[case][1], options.device
    call = case, "torch", device
    variants = {
        "FP32": worker.variant(Call, *call, torch.float32),
        "torch": worker.variant(Call, *call, getattr(torch, half)),
        "ampfuse": Variant(Clock(device), Call(*call, getattr(torch, half))),
    }
    return rows_of(device, measure(variants, options.repeats), case=case, dtype=half)


def main() -> None:
    """Measures every variant of each case and writes the CSV."""
    options = options_of(__doc__, "layers")
    results = Results(options)
    operations = OPERATIONS if options.device.type == "cpu" else {}
    with Worker(Clock, options.device) as worker:
        for threads, case in product(options.threads, (*NORMS, *ROWS, *operations)):
            if results.want(case):
                torch.set_num_threads(threads)
                rows = operation_rows if case in OPERATIONS else layer_rows
                results.add(rows(case, options, worker))
                worker.clear()
    results.finish()


if __name__ == "__main__":
    main()
