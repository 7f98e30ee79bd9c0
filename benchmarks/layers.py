"""Norms, activations and losses in half precision, alone, forward and backward.

    python benchmarks/layers.py [--device cuda] [--only norm rms ...] [--quick]

docs/benchmarks.md describes the cases. torch's operations run in a process that never imports
ampfuse; "copy" is the bytes of a case at the bandwidth of a copy.
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
from harness.options import options_of
from harness.results import Results, Row, rows_of
from torch import Tensor

Shape = tuple[int, ...]
Function = Callable[..., Any]

BATCH = {"cpu": 8, "cuda": 256}
# Channels, side of the images.
NORMS = """
norm-64-112 norm-64-56 norm-256-56-residual
norm-128-28 norm-512-28-residual
norm-256-14 norm-1024-14-residual
norm-512-7 norm-2048-7-residual""".split()
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
    from ampfuse.nn import batch_norm_act

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
    """The functions of a case by variant, of `inputs` in half and then of `weights`.

    `half_bytes` are read and written for an element of the first input; `count` layers run one
    after another.
    """

    variants: dict[str, Function]
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
        image = (BATCH[kind], channels, side, side)
        residuals = 1 if case.endswith("residual") else 0
        variants = {"torch": norm, "fused": fused_norm, "cuDNN": cudnn_norm}
        # moments, apply, reduce, dx; a residual is read, and its gradient written and read
        half_bytes = 2 * (1 + 2 + 2 + 3 + 2 * residuals) + 3 / 8
        count = max(1, (96 << 20) // (2 * math.prod(image)))
        images, weights = [image] * (1 + residuals), [(channels,)] * 2
        return Layer(variants, images, weights, torch.float32, half_bytes, count)
    _, columns = shape = ROWS[case]
    if name in ("rows", "rms"):  # forward, backward, weights
        variants = {"torch": add_norm, "fused": fused_add_norm}
        weights = [(columns,)] * (2 if name == "rows" else 1)
        return Layer(variants, [shape] * 2, weights, half_bytes=8 + 8 + 4)
    if name == "loss":
        return Layer({"torch": loss, "fused": fused_loss}, [shape], half_bytes=2 + 4)
    variants = {"torch": partial(act, name), "fused": partial(fused_act, name)}
    gated = case.endswith("gated")
    other, half_bytes = (shape, 6 + 10) if gated else ((columns,), 4 + 6)
    return Layer(variants, [shape, other], half_bytes=half_bytes)


class Call:
    """Forward and backward of a case."""

    def __init__(
        self, case: str, variant: str, device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        layer = layer_of(case, device.type)

        def tensor(shape: Shape) -> Tensor:
            x = torch.randn(shape, device=device).mul_(0.1).to(dtype)
            images = torch.channels_last if x.dim() == 4 else torch.contiguous_format
            return x.contiguous(memory_format=images).requires_grad_()

        self.function = layer.variants[variant]
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
    if kind == "cuda" and "cuDNN" in layer.variants:
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


def main() -> None:
    """Measures every variant of each case and writes the CSV."""
    options = options_of(__doc__, "layers")
    results = Results(options)
    with Worker(options.device) as worker:
        for threads, case in product(options.threads, (*NORMS, *ROWS)):
            if results.want(case):
                torch.set_num_threads(threads)
                results.add(layer_rows(case, options, worker))
                worker.clear()
    results.finish()


if __name__ == "__main__":
    main()
