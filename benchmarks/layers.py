"""Norms, activations, convolutions and other operations in half precision, alone.

    python benchmarks/layers.py [--device cuda] [--only norm conv-8 ...] [--quick]

Cases "norm-..." are a batch norm with its ReLU (and its residual), forward and backward, at the
shapes of ResNet-50's layers with a batch of 8 (256 on a GPU), as many as fill 96 MiB: torch's
operations, in a process that never imports ampfuse, the fused one, and "copy", its bytes (see
csrc/core/nn_ops/batch_norm.h) at the bandwidth of a copy. On a GPU "cuDNN" is torch's operations
with the batch norm by cuDNN, in FP16: torch has kernels of its own for BF16.

Cases "rows-..." are a residual addition with the layer norm after it, "rms-..." with an RMS norm,
at the widths of ConvNeXt-T, ViT-S, GPT-2 and Llama; csrc/core/nn_ops/norm.h has the bytes.

Cases "gelu-...", "gelu_tanh-..." and "silu-..." are an activation behind a bias, or gated, at the
widths of ViT-S, GPT-2 and Llama; csrc/core/nn_ops/activation.h has the bytes.

Cases "conv-..." and "op-..." are one operation, forward and backward, on the CPU: in FP32 and in
half by torch, and in half with ``ampfuse.cpu_half_ops()``, which runs the convolutions as matrix
products (see csrc/torch/half_conv.cpp). Where torch's half takes many times FP32's time, torch has
no half kernel for that operation on this CPU: what csrc/torch/half_ops.cpp mends. With
ONEDNN_MAX_CPU_ISA=AVX2 (AVX512_CORE, ...), oneDNN does as on an older CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from harness.limits import bounds
from harness.measuring import Clock, Variant, Worker, WorkerError, measure
from harness.results import Results, Row, options_of, rows_of
from torch import Tensor, nn

BATCH = {"cpu": 8, "cuda": 256}
_ARRAY_BYTES = {"cpu": 64 << 20, "cuda": 4 << 30}  # that bandwidth is measured on
# A batch norm's channels, the side of its images, whether a residual is added.
LAYERS = {
    "norm-64-112": (64, 112, False),
    "norm-64-56": (64, 56, False),
    "norm-256-56-residual": (256, 56, True),
    "norm-128-28": (128, 28, False),
    "norm-512-28-residual": (512, 28, True),
    "norm-256-14": (256, 14, False),
    "norm-1024-14-residual": (1024, 14, True),
    "norm-512-7": (512, 7, False),
    "norm-2048-7-residual": (2048, 7, True),
}
# Rows, columns.
ROWS = {
    "rows-96": (25088, 96),
    "rows-384": (1576, 384),
    "rows-768": (8192, 768),
    "rows-4096": (4096, 4096),
    "rms-768": (8192, 768),
    "rms-4096": (4096, 4096),
}
ACTS = {
    "gelu-1536": (1576, 1536),
    "gelu-3072": (8192, 3072),
    "gelu_tanh-3072": (8192, 3072),
    "silu-11008-gated": (2048, 11008),
}
# A convolution's batch, channels, filters, side of its images, side of its kernel, and stride.
SMALL = (
    (8, 1024, 256, 14, 1, 1),
    (8, 1024, 2048, 14, 1, 2),
    (8, 2048, 512, 7, 1, 1),
    (8, 512, 512, 7, 3, 1),
    (32, 384, 192, 8, 1, 1),
    (32, 1000, 192, 2, 1, 1),
    (32, 2000, 192, 1, 1, 1),
    (32, 192, 48, 2, 3, 1),
    (64, 512, 512, 4, 3, 1),
    (64, 512, 512, 2, 3, 1),
)
# A function, and the shapes of its inputs; "x" is a batch of images.
OPS: dict[str, tuple[Callable[..., Tensor], str]] = {
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


# case: operation and dtype; the small convolutions in BF16 alone
OPERATIONS = {
    f"op-{name}-{half}": (name, half) for name, half in product(OPS, ("bfloat16", "float16"))
}
for n, channels, filters, side, kernel, stride in SMALL:
    name = f"conv-{n}-{channels}-{filters}-{side}-{kernel}-{stride}"
    shapes = f"{n},{channels},{side},{side} {filters},{channels},{kernel},{kernel}"
    OPS[name] = partial(F.conv2d, stride=stride, padding=kernel // 2), shapes
    OPERATIONS[name] = name, "bfloat16"


class Norm:
    """Forward and backward of several such layers, one after another, by torch's operations.

    Of so many that no cache holds the tensors of all. One call of a cold process would mostly
    measure how its instructions come from memory.
    """

    dtype = torch.bfloat16

    def __init__(self, channels: int, side: int, residual: bool, device: torch.device) -> None:
        batch = BATCH[device.type]

        def image() -> Tensor:
            x = torch.randn(batch, channels, side, side, device=device, dtype=self.dtype)
            return x.contiguous(memory_format=torch.channels_last)

        count = layers_of(batch, channels, side)
        self.norm = self.make(channels).to(device)
        self.x = [image().requires_grad_() for _ in range(count)]
        self.residual = [image().requires_grad_() if residual else None for _ in range(count)]
        self.dy = image()

    def make(self, channels: int) -> nn.Module:
        return nn.BatchNorm2d(channels)

    def run(self, x: Tensor, residual: Tensor | None) -> Tensor:
        y = self.norm(x)
        if residual is not None:
            y += residual
        return F.relu_(y)

    def __call__(self) -> None:
        self.norm.zero_grad()
        for x, residual in zip(self.x, self.residual, strict=True):
            self.run(x, residual).backward(self.dy)
            x.grad = None
            if residual is not None:
                residual.grad = None


def layers_of(batch: int, channels: int, side: int) -> int:
    return max(1, (96 << 20) // (batch * channels * side * side * 2))


class CudnnNorm(Norm):
    dtype = torch.float16

    def run(self, x: Tensor, residual: Tensor | None) -> Tensor:
        n = self.norm
        statistics = n.running_mean, n.running_var
        y = torch.cudnn_batch_norm(x, n.weight, n.bias, *statistics, True, n.momentum, n.eps)[0]
        if residual is not None:
            y += residual
        return F.relu_(y)


class FusedNorm(Norm):
    def make(self, channels: int) -> nn.Module:
        from ampfuse.nn import BatchNormAct2d

        return BatchNormAct2d(channels, activation="relu")

    def run(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return self.norm(x, residual)


class AddNorm:
    """Forward and backward of an addition and the norm of the sum, which has a gradient, too."""

    def __init__(self, case: str, device: torch.device) -> None:
        rows, columns = ROWS[case]
        self.rms, self.shape = case.startswith("rms"), [columns]
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.inputs = [torch.randn(rows, columns, **options).requires_grad_() for _ in range(2)]
        weights = 1 if self.rms else 2
        self.weights = [torch.ones(columns, **options).requires_grad_() for _ in range(weights)]
        self.gradients = [torch.randn(rows, columns, **options) for _ in range(2)]

    def run(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        norm = F.rms_norm if self.rms else F.layer_norm
        return norm(total, self.shape, *self.weights), total

    def __call__(self) -> None:
        outputs = self.run(*self.inputs)
        torch.autograd.grad(outputs, [*self.inputs, *self.weights], self.gradients)


class FusedAddNorm(AddNorm):
    def run(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        from ampfuse.nn import add_layer_norm, add_rms_norm

        norm: Any = add_rms_norm if self.rms else add_layer_norm
        return norm(x, residual, self.shape, *self.weights)


class Act:
    """Forward and backward of an activation, of the sum with a bias or times another tensor."""

    def __init__(self, case: str, device: torch.device) -> None:
        self.name = case.partition("-")[0]
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        rows, columns = ACTS[case]
        other = ACTS[case] if case.endswith("gated") else (columns,)
        self.inputs = [torch.randn(s, **options).requires_grad_() for s in ((rows, columns), other)]
        self.dy = torch.randn(rows, columns, **options)

    def run(self, x: Tensor, other: Tensor) -> Tensor:
        if self.name == "silu":
            return F.silu(x) * other
        return F.gelu(x + other, approximate="tanh" if self.name == "gelu_tanh" else "none")

    def __call__(self) -> None:
        torch.autograd.grad(self.run(*self.inputs), self.inputs, self.dy)


class FusedAct(Act):
    def run(self, x: Tensor, other: Tensor) -> Tensor:
        from ampfuse.nn import bias_act, gated_act

        act: Any = gated_act if self.name == "silu" else bias_act
        return act(x, other, self.name)


class Operation:
    """Forward and backward of one of `OPS`."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.function, shapes = OPS[name]
        self.inputs = [self._tensor(shape, dtype) for shape in shapes.split()]
        self.dy = torch.ones_like(self.function(*self.inputs))

    @staticmethod
    def _tensor(text: str, dtype: torch.dtype) -> Tensor:
        shape = [int(size) for size in text.replace("x", "32,32,16,16").split(",")]
        x = torch.randn(shape).mul_(0.1).to(dtype)
        images = torch.channels_last if x.dim() == 4 else torch.contiguous_format
        return x.contiguous(memory_format=images).requires_grad_()

    def __call__(self) -> None:
        torch.autograd.grad(self.function(*self.inputs), self.inputs, self.dy)


def norms_of(case: str, options: Any, worker: Worker) -> list[Row]:
    channels, side, residual = layer = LAYERS[case]
    kind = options.device.type
    batch = BATCH[kind]
    elements = batch * side * side * channels * layers_of(batch, channels, side)
    # moments, apply, reduce, dx; a residual is read, and its gradient written and read
    half_bytes = 2 * (1 + 2 + 2 + 3 + (2 if residual else 0)) + 3 / 8
    variants = {
        "torch": worker.variant(Norm, *layer, options.device),
        "fused": Variant(Clock(options.device), FusedNorm(*layer, options.device)),
        "copy": bounds(options.device, _ARRAY_BYTES[kind], elements, half_bytes, 0)["copy"],
    }
    if kind == "cuda":
        cudnn = worker.variant(CudnnNorm, *layer, options.device)
        try:
            cudnn()
            variants["cuDNN"] = cudnn
        except WorkerError as error:  # keeps no other from being measured
            print(f"{case:28s} cuDNN: not run ({error})")
    return rows_of(
        options.device,
        measure(variants, options.repeats),
        case=case if kind == "cpu" else f"{case}-batch-{batch}",
        params=elements,
        dtype="bfloat16",
        bytes_per_param=dict.fromkeys(variants, half_bytes),
    )


def rows_of_case(case: str, options: Any, worker: Worker) -> list[Row]:
    """Of a norm of rows or an activation."""
    norm = case in ROWS
    rows, columns = (ROWS if norm else ACTS)[case]
    # Forward, backward, weights; an activation gated, or with a bias.
    half_bytes = 8 + 8 + 4 if norm else 6 + 10 if case.endswith("gated") else 4 + 6
    kind, elements = options.device.type, rows * columns
    torchs, fused = (AddNorm, FusedAddNorm) if norm else (Act, FusedAct)
    variants = {
        "torch": worker.variant(torchs, case, options.device),
        "fused": Variant(Clock(options.device), fused(case, options.device)),
        "copy": bounds(options.device, _ARRAY_BYTES[kind], elements, half_bytes, 0)["copy"],
    }
    return rows_of(
        options.device,
        measure(variants, options.repeats),
        case=case,
        params=elements,
        dtype="bfloat16",
        bytes_per_param=dict.fromkeys(variants, half_bytes),
    )


def operation_of(case: str, options: Any, worker: Worker) -> list[Row]:
    import ampfuse

    ampfuse.cpu_half_ops()
    name, half = OPERATIONS[case]
    dtype = getattr(torch, half)
    variants = {
        "FP32": worker.variant(Operation, name, torch.float32),
        "torch": worker.variant(Operation, name, dtype),
        "ampfuse": Variant(Clock(options.device), Operation(name, dtype)),
    }
    return rows_of(options.device, measure(variants, options.repeats), case=case, dtype=half)


def main() -> None:
    """Measures every variant of each case and writes the CSV."""
    options = options_of(__doc__, "layers")
    results = Results(options)
    with Worker(Clock, options.device) as worker:
        for threads in options.threads:
            torch.set_num_threads(threads)
            for case in (*LAYERS, *ROWS, *ACTS):
                if results.want(case):
                    of = norms_of if case in LAYERS else rows_of_case
                    results.add(of(case, options, worker))
                    worker.clear()
            for case in OPERATIONS if options.device.type == "cpu" else ():
                if results.want(case):
                    results.add(operation_of(case, options, worker))
                    worker.clear()
    results.finish()


if __name__ == "__main__":
    main()
