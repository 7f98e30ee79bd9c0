"""Whole training steps of convolutional nets, and their batch norms alone.

    python benchmarks/conv_nets.py [--device cuda] [--only resnet18 ...] [--quick]

A step is forward pass, loss, backward pass and SGD with momentum, on one batch of random images in
channels-last memory. Variants:

    FP32             torch, torch's fused SGD
    torch.amp        torch.autocast in BF16, torch's fused SGD
    torch.amp, compiled   the same under torch.compile
    O5               ampfuse's BF16 model with FP32 masters
    O5, fused        the same with fuse_batchnorm=True
    O5, recomputed   the same under ampfuse.nn.recompute_norms
    convolutions     what they take of "O5, fused": the least that any fusion leaves

The column memory_mib has the peak of a step's tensors.

Cases "norm-..." are a batch norm with its ReLU (and its residual) alone, forward and backward, at
the shapes of ResNet-50's layers with a batch of 8, as many as fill 96 MiB: torch's operations, the
fused one, "copy", its bytes (see csrc/core/batch_norm.h) at the bandwidth of a copy, and on a GPU
"cuDNN, FP16": cuDNN's own fused one in the other half type, whose bytes are the same.

Cases "conv-..." are a convolution alone, forward and backward in BF16 on the CPU: torch's, and with
ampfuse's products in its place (see csrc/torch/half_conv.cpp). Whatever is called "torch" or
"torch.amp" runs torch's kernels alone.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

# oneDNN keeps 1,024 primitives by default. All variants of one network need more, and each would be
# compiled again in every step.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")

import torch
import torch.nn.functional as F
from cudnn_norm import CudnnNorm
from harness import Clock, Row, measure, rows_of
from limits import bounds
from step import Results, options_of
from torch import Tensor, nn
from torch.profiler import profile

from ampfuse import amp, cpu_half_ops
from ampfuse.experiments import models
from ampfuse.measuring import TensorMemory
from ampfuse.nn import recompute_norms
from ampfuse.nn.batch_norm import normalize

# name: side of the images, batch
NETS = {
    "resnet18": (224, 16),
    "resnet50": (224, 8),
    "wrn16_4": (32, 64),
    "seresnext50_32x4d": (32, 32),
    "densenet161": (32, 32),
    "vgg16": (32, 64),
}
# A batch norm's channels, the side of its images, whether a residual is added; the batch is 8.
LAYERS = (
    (64, 112, False),
    (64, 56, False),
    (256, 56, True),
    (128, 28, False),
    (512, 28, True),
    (256, 14, False),
    (1024, 14, True),
    (512, 7, False),
    (2048, 7, True),
)
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


class Step:
    """FP32, and what the others change of it."""

    sgd_fused: bool | None = True  # torch's own
    half_ops = False

    def __init__(self, model: nn.Module, side: int, batch: int, device: torch.device) -> None:
        self.model = copy.deepcopy(model).to(device, memory_format=torch.channels_last)
        self.x = torch.randn(batch, 3, side, side, device=device)
        self.x = self.x.contiguous(memory_format=torch.channels_last)
        self.y = torch.arange(batch, device=device) % 100
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4, fused=self.sgd_fused
        )
        self.set_up()

    def set_up(self) -> None:
        pass

    def loss(self) -> Tensor:
        return F.cross_entropy(self.model(self.x), self.y)

    def prepare(self) -> None:
        cpu_half_ops(self.half_ops)

    def __call__(self) -> object:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()


class TorchAmp(Step):
    def loss(self) -> Tensor:
        with torch.autocast(self.x.device.type, dtype=torch.bfloat16):
            return super().loss()


class Compiled(TorchAmp):
    def set_up(self) -> None:
        self.model.compile()


class O5(Step):
    sgd_fused = None
    half_ops = True
    fuse_batchnorm = False

    def set_up(self) -> None:
        options = {"opt_level": "O5", "verbosity": 0, "fuse_batchnorm": self.fuse_batchnorm}
        self.model, self.optimizer = amp.initialize(self.model, self.optimizer, **options)

    def __call__(self) -> object:
        self.optimizer.zero_grad()
        with amp.scale_loss(self.loss(), self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()


class Fused(O5):
    fuse_batchnorm = True


class Recomputed(Fused):
    def loss(self) -> Tensor:
        with recompute_norms():
            return super().loss()


class Convolutions(Fused):
    def __call__(self) -> float:  # its own measure, see `measure`
        with profile() as profiled:
            super().__call__()
        on = "device" if self.x.is_cuda else "cpu"
        events = profiled.key_averages()
        return sum(getattr(e, f"{on}_time_total") for e in events if e.key in CONVOLUTIONS) / 1e3


CONVOLUTIONS = {"aten::convolution", "aten::convolution_backward"}
VARIANTS: dict[str, type[Step]] = {
    "FP32": Step,
    "torch.amp": TorchAmp,
    "torch.amp, compiled": Compiled,
    "O5": O5,
    "O5, fused": Fused,
    "O5, recomputed": Recomputed,
    "convolutions": Convolutions,
}


class Norm:
    """Forward and backward of several such layers, one after another, by torch's operations.

    Of so many that no cache holds the tensors of all. One call of a cold process would mostly
    measure how its instructions come from memory.
    """

    dtype = torch.bfloat16

    def __init__(self, channels: int, side: int, residual: bool, device: torch.device) -> None:
        def image() -> Tensor:
            x = torch.randn(8, channels, side, side, device=device, dtype=self.dtype)
            return x.contiguous(memory_format=torch.channels_last)

        count = layers_of(channels, side)
        self.norm = nn.BatchNorm2d(channels).to(device)
        self.x = [image().requires_grad_() for _ in range(count)]
        self.residual = [image().requires_grad_() if residual else None for _ in range(count)]
        self.dy = image()

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


def layers_of(channels: int, side: int) -> int:
    return max(1, (96 << 20) // (8 * channels * side * side * 2))


class FusedNorm(Norm):
    def run(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return normalize(self.norm, x, residual, True)


class DirectCudnn(Norm):
    dtype = torch.float16

    def __init__(self, channels: int, side: int, residual: bool, device: torch.device) -> None:
        super().__init__(channels, side, residual, device)
        self.cudnn = CudnnNorm(self.x[0].detach(), residual)

    def __call__(self) -> None:
        for x, residual in zip(self.x, self.residual, strict=True):
            y = self.cudnn.forward(x, residual)
            self.cudnn.backward(x, y, self.dy, residual is not None)


class Convolution:
    def __init__(
        self,
        batch: int,
        channels: int,
        filters: int,
        side: int,
        kernel: int,
        stride: int,
        half_ops: bool,
    ) -> None:
        self.half_ops = half_ops
        conv = nn.Conv2d(channels, filters, kernel, stride, kernel // 2, bias=False)
        self.conv = conv.to(torch.bfloat16, memory_format=torch.channels_last)
        x = torch.randn(batch, channels, side, side, dtype=torch.bfloat16)
        self.x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        self.dy = torch.randn_like(self.conv(self.x))

    def prepare(self) -> None:
        cpu_half_ops(self.half_ops)

    def __call__(self) -> None:
        self.x.grad = self.conv.weight.grad = None
        self.conv(self.x).backward(self.dy)


def convolution_of(layer: tuple[int, ...], options: Any) -> list[Row]:
    variants = {
        "torch": Convolution(*layer, half_ops=False),
        "products": Convolution(*layer, half_ops=True),
    }
    times = measure(Clock(options.device), variants, options.repeats)
    return rows_of(options.device, times, case=convolution_name(layer), dtype="bfloat16")


def convolution_name(layer: tuple[int, ...]) -> str:
    return "conv-" + "-".join(map(str, layer))


def steps_of(name: str, options: Any) -> list[Row]:
    side, batch = NETS[name]
    if options.quick:
        side, batch = min(side, 64), 4
    torch.manual_seed(0)
    model = models.build(name, classes=100, channels=3, image_size=side)
    names = [v for v in VARIANTS if not (options.no_compile and v.endswith("compiled"))]
    steps: dict[str, Step] = {v: VARIANTS[v](model, side, batch, options.device) for v in names}
    times = measure(Clock(options.device), steps, options.repeats)
    what = {"case": f"{name}-{side}-batch{batch}", "optimizer": "SGD"}
    rows = rows_of(options.device, times, **what)
    memory = {}
    for variant, step in steps.items():
        step.prepare()
        with TensorMemory(options.device) as peak:
            step()
        memory[variant] = round(peak.mib, 1)
    return [replace(row, memory_mib=memory[row.variant]) for row in rows]


def name_of(channels: int, side: int, residual: bool) -> str:
    return f"norm-{channels}-{side}{'-residual' if residual else ''}"


def norms_of(channels: int, side: int, residual: bool, options: Any) -> list[Row]:
    elements = 8 * side * side * channels * layers_of(channels, side)
    # moments, apply, reduce, dx; a residual is read, and its gradient written and read
    half_bytes = 2 * (1 + 2 + 2 + 3 + (2 if residual else 0)) + 3 / 8
    variants: dict[str, Callable[[], Any]] = {
        "torch": Norm(channels, side, residual, options.device),
        "fused": FusedNorm(channels, side, residual, options.device),
        "copy": bounds(options.device, 64 << 20, elements, half_bytes, 0)["copy"],
    }
    if options.device.type == "cuda":
        try:
            variants["cuDNN, FP16"] = DirectCudnn(channels, side, residual, options.device)
        except RuntimeError as error:  # such shapes are not measured
            print(f"{name_of(channels, side, residual)}: {error}")
    times = measure(Clock(options.device), variants, options.repeats)
    return rows_of(
        options.device,
        times,
        case=name_of(channels, side, residual),
        params=elements,
        dtype="bfloat16",
        bytes_per_param=dict.fromkeys(variants, half_bytes),
    )


def main() -> None:
    """Measures every variant of each case and writes the CSV."""
    options = options_of(__doc__, "conv_nets")
    results = Results(options)
    for threads in options.threads:
        torch.set_num_threads(threads)
        for layer in LAYERS:
            if results.want(name_of(*layer)):
                results.add(norms_of(*layer, options))
        for small in SMALL if options.device.type == "cpu" else ():
            if results.want(convolution_name(small)):
                results.add(convolution_of(small, options))
    for name in NETS:  # at all threads
        if results.want(name):
            results.add(steps_of(name, options))
    results.finish()


if __name__ == "__main__":
    main()
