"""Which operations are slow in half precision on this CPU?

Times the operations of common networks, forward and backward, in FP32 and in half, and writes one
CSV row per operation, direction, memory layout and half dtype. A ratio far above 1 means torch has
no fast half kernel for that operation on this CPU: what `csrc/torch/half_ops.cpp` mends.

    python benchmarks/half_ops.py --csv out.csv             # as ampfuse runs it
    python benchmarks/half_ops.py --torch --csv out.csv     # as torch alone does
    ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/half_ops.py   # as an older CPU does

`ONEDNN_MAX_CPU_ISA` (AVX2, AVX512_CORE, ...) hides newer instructions from oneDNN, through which
torch computes in half; so one machine shows what several generations of CPUs do. Each time is the
shortest of up to 9 runs. One thread by default: threads that wait for each other measure what else
the machine does.
"""

import argparse
import csv
import os
import platform
import sys
import time

import torch
import torch.nn.functional as F

try:
    from ampfuse import cpu_half_ops
except ImportError:  # torch alone can be surveyed too
    cpu_half_ops = None

ACTIVATIONS = {  # training shapes, from digits to ImageNet stages
    "digits": (128, 1, 8, 8),
    "small": (64, 32, 16, 16),
    "cifar": (128, 64, 32, 32),
    "deep": (32, 256, 8, 8),
}


class Case:
    """One operation: the shapes of its differentiable inputs and a function of them."""

    def __init__(self, name, call, *shapes, layouts=("contiguous",)):
        self.name, self.call, self.shapes, self.layouts = name, call, shapes, layouts


def cases(activations):
    """Yields every Case of the survey; those on images once per named shape of ACTIVATIONS."""
    both = ("contiguous", "channels_last")
    random = torch.Generator().manual_seed(0)

    for label in activations:
        x = n, c, h, w = ACTIVATIONS[label]
        filters = max(c, 32)

        def image(name, call, *more, x=x, label=label):
            return Case(f"{name} {label}", call, x, *more, layouts=both)

        yield image(
            "conv2d 3x3",
            lambda x, k, b: F.conv2d(x, k, b, padding=1),
            (filters, c, 3, 3),
            (filters,),
        )
        yield image(
            "conv2d 3x3 no bias", lambda x, k: F.conv2d(x, k, padding=1), (filters, c, 3, 3)
        )
        yield image("conv2d 1x1 no bias", lambda x, k: F.conv2d(x, k), (filters, c, 1, 1))
        yield image(
            "conv2d 3x3 stride 2",
            lambda x, k: F.conv2d(x, k, stride=2, padding=1),
            (filters, c, 3, 3),
        )
        yield image(
            "conv2d 3x3 dilated",
            lambda x, k: F.conv2d(x, k, padding=2, dilation=2),
            (filters, c, 3, 3),
        )
        yield image(
            "conv2d depthwise", lambda x, k, c=c: F.conv2d(x, k, padding=1, groups=c), (c, 1, 3, 3)
        )
        if c >= 32:
            yield image(
                "conv2d grouped",
                lambda x, k: F.conv2d(x, k, padding=1, groups=8),
                (filters, c // 8, 3, 3),
            )
        yield image(
            "conv_transpose2d", lambda x, k: F.conv_transpose2d(x, k, stride=2), (c, filters, 2, 2)
        )
        yield image(
            "batch_norm", lambda x, g, b: F.batch_norm(x, None, None, g, b, True), (c,), (c,)
        )
        yield image(
            "batch_norm eval",
            lambda x, g, b, c=c: F.batch_norm(x, x.new_zeros(c), x.new_ones(c), g, b, False),
            (c,),
            (c,),
        )
        yield image("group_norm", lambda x, g, b, c=c: F.group_norm(x, min(8, c), g, b), (c,), (c,))
        yield image("instance_norm", lambda x: F.instance_norm(x))
        yield image("max_pool2d 2", lambda x: F.max_pool2d(x, 2))
        yield image("max_pool2d 3 stride 2", lambda x: F.max_pool2d(x, 3, 2, 1))
        yield image("avg_pool2d", lambda x: F.avg_pool2d(x, 2))
        yield image("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 1))
        yield image("adaptive_avg_pool2d 7", lambda x: F.adaptive_avg_pool2d(x, 7))
        yield image("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 4))
        yield image("interpolate nearest", lambda x: F.interpolate(x, scale_factor=2))
        yield image(
            "interpolate bilinear", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")
        )
        yield image(
            "interpolate bicubic", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic")
        )
        yield image("pad zero", lambda x: F.pad(x, (1, 1, 1, 1)))
        yield image("pad reflect", lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"))
        yield image("pad replicate", lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"))
        yield image(
            "pixel_shuffle", lambda x: F.pixel_shuffle(x, 2) if x.shape[1] % 4 == 0 else x * 1
        )
        yield image("unfold", lambda x: F.unfold(x, 3, padding=1))
        yield image(
            "grid_sample",
            lambda x, n=n, h=h, w=w: F.grid_sample(
                x, torch.zeros(n, h, w, 2, dtype=x.dtype), align_corners=False
            ),
        )
        for name in ("relu", "gelu", "silu", "sigmoid", "tanh", "elu", "softplus", "hardswish"):
            yield image(name, getattr(F, name))
        yield image("leaky_relu", lambda x: F.leaky_relu(x, 0.1))
        yield image("prelu", F.prelu, (c,))
        yield image("dropout", lambda x: F.dropout(x, 0.5))
        yield image("dropout2d", lambda x: F.dropout2d(x, 0.5))
        yield image("add", lambda x, y: x + y, x)
        yield image("mul", lambda x, y: x * y, x)
        yield image("div", lambda x, y: x / (y * y + 1), x)
        yield image("exp", torch.exp)
        yield image("sqrt abs", lambda x: (x.abs() + 1).sqrt())
        yield image("pow 2", lambda x: x**2)
        yield image("clamp", lambda x: x.clamp(-1, 1))
        yield image("where", lambda x: torch.where(x > 0, x, 0.1 * x))
        yield image("sum", lambda x: x.sum())
        yield image("mean image", lambda x: x.mean((2, 3)))
        yield image("mean channel", lambda x: x.mean((0, 2, 3)))
        yield image("std", lambda x: x.std((0, 2, 3)))
        yield image("amax", lambda x: x.amax((2, 3)))
        yield image("norm", lambda x: x.norm())
        yield image("cumsum", lambda x: x.cumsum(-1))
        yield image("softmax channel", lambda x: x.softmax(1))
        yield image("cat", lambda x, y: torch.cat([x, y], 1), x)
        yield image("stack", lambda x, y: torch.stack([x, y]), x)
        yield image("flatten permute", lambda x: x.permute(0, 2, 3, 1).contiguous())
        yield image("flip", lambda x: x.flip(-1))
        yield image("roll", lambda x: x.roll(1, -1))

    yield Case(
        "conv1d k5", lambda x, k, b: F.conv1d(x, k, b, padding=2), (32, 64, 256), (64, 64, 5), (64,)
    )
    yield Case(
        "conv1d depthwise",
        lambda x, k: F.conv1d(x, k, padding=3, groups=64),
        (32, 64, 256),
        (64, 1, 7),
    )
    yield Case(
        "conv_transpose1d",
        lambda x, k: F.conv_transpose1d(x, k, stride=2),
        (32, 64, 128),
        (64, 64, 4),
    )
    yield Case(
        "conv3d",
        lambda x, k, b: F.conv3d(x, k, b, padding=1),
        (4, 16, 8, 16, 16),
        (32, 16, 3, 3, 3),
        (32,),
    )
    yield Case(
        "conv_transpose3d",
        lambda x, k: F.conv_transpose3d(x, k, stride=2),
        (4, 16, 4, 8, 8),
        (16, 16, 2, 2, 2),
    )
    yield Case("max_pool3d", lambda x: F.max_pool3d(x, 2), (4, 16, 8, 16, 16))
    yield Case("avg_pool1d", lambda x: F.avg_pool1d(x, 2), (32, 64, 256))
    yield Case("avg_pool3d", lambda x: F.avg_pool3d(x, 2), (4, 16, 8, 16, 16))
    yield Case("max_pool1d", lambda x: F.max_pool1d(x, 2), (32, 64, 256))
    yield Case(
        "interpolate linear",
        lambda x: F.interpolate(x, scale_factor=2, mode="linear"),
        (32, 64, 256),
    )
    yield Case(
        "interpolate trilinear",
        lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
        (4, 16, 8, 16, 16),
    )

    yield Case("linear digits", F.linear, (128, 64), (128, 64), (128,))
    yield Case("linear", F.linear, (512, 512), (1024, 512), (1024,))
    yield Case("linear no bias", F.linear, (512, 512), (1024, 512))
    yield Case("linear 3d", F.linear, (16, 64, 512), (512, 512), (512,))
    yield Case("linear 10 classes", F.linear, (128, 512), (10, 512), (10,))
    yield Case("matmul", torch.matmul, (512, 512), (512, 1024))
    yield Case("matvec", torch.mv, (1024, 1024), (1024,))
    yield Case("dot", torch.dot, (65536,), (65536,))
    yield Case("outer", torch.outer, (1024,), (1024,))
    yield Case("bmm", torch.bmm, (64, 64, 64), (64, 64, 64))
    yield Case("baddbmm", torch.baddbmm, (64, 64, 64), (64, 64, 64), (64, 64, 64))
    yield Case(
        "einsum", lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b), (8, 8, 64, 64), (8, 8, 64, 64)
    )
    yield Case("bilinear", F.bilinear, (64, 32), (64, 32), (16, 32, 32), (16,))
    heads = (8, 8, 128, 64)
    yield Case("attention", F.scaled_dot_product_attention, heads, heads, heads)
    yield Case(
        "attention causal",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        heads,
        heads,
        heads,
    )
    yield Case(
        "attention mask",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=q.new_zeros(128, 128)),
        heads,
        heads,
        heads,
    )
    yield Case(
        "attention dropout",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1),
        heads,
        heads,
        heads,
    )
    tokens = (32, 64, 512)
    yield Case("layer_norm", lambda x, g, b: F.layer_norm(x, (512,), g, b), tokens, (512,), (512,))
    yield Case("rms_norm", lambda x, g: F.rms_norm(x, (512,), g), tokens, (512,))
    yield Case("softmax", lambda x: x.softmax(-1), tokens)
    yield Case("log_softmax", lambda x: x.log_softmax(-1), tokens)
    yield Case("glu", F.glu, tokens)
    yield Case("normalize", lambda x: F.normalize(x, dim=-1), tokens)
    yield Case("topk", lambda x: x.topk(5, -1)[0], tokens)
    yield Case("sort", lambda x: x.sort(-1)[0], (32, 64, 128))
    yield Case("transpose contiguous", lambda x: x.transpose(1, 2).contiguous(), tokens)
    label = torch.randint(0, 1000, (512,), generator=random)
    yield Case("cross_entropy", lambda x: F.cross_entropy(x, label), (512, 1000))
    yield Case(
        "cross_entropy smooth",
        lambda x: F.cross_entropy(x, label, label_smoothing=0.1),
        (512, 1000),
    )
    dense = torch.randint(0, 21, (4, 64, 64), generator=random)
    yield Case(
        "cross_entropy 2d", lambda x: F.cross_entropy(x, dense), (4, 21, 64, 64), layouts=both
    )
    yield Case("mse_loss", F.mse_loss, (512, 1000), (512, 1000))
    yield Case("l1_loss", F.l1_loss, (512, 1000), (512, 1000))
    yield Case("smooth_l1_loss", F.smooth_l1_loss, (512, 1000), (512, 1000))
    yield Case(
        "bce_with_logits",
        lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x)),
        (512, 1000),
    )
    yield Case(
        "kl_div",
        lambda x: F.kl_div(x, torch.zeros_like(x).softmax(-1), reduction="batchmean"),
        (512, 1000),
    )
    words = torch.randint(0, 10000, (32, 64), generator=random)
    yield Case("embedding", lambda e: F.embedding(words, e), (10000, 128))
    yield Case("embedding_bag", lambda e: F.embedding_bag(words, e), (10000, 128))
    rows = torch.randint(0, 4096, (8192,), generator=random)
    yield Case("index_select", lambda x: x.index_select(0, rows), (4096, 128))
    yield Case("index", lambda x: x[rows], (4096, 128))
    yield Case("index_add", lambda x, y: x.index_add(0, rows, y), (4096, 128), (8192, 128))
    yield Case(
        "index_put accumulate",
        lambda x, y: x.index_put((rows,), y, accumulate=True),
        (4096, 128),
        (8192, 128),
    )
    wide = rows[:, None].expand(8192, 128)
    yield Case("gather", lambda x: x.gather(0, wide), (4096, 128))
    yield Case("scatter_add", lambda x, y: x.scatter_add(0, wide, y), (4096, 128), (8192, 128))
    yield Case("masked_fill", lambda x: x.masked_fill(x > 0, 0.0), (4096, 128))
    for kind in ("RNN", "GRU", "LSTM"):
        yield Case(f"{kind} 64", recurrent(kind, 64), (32, 32, 64))
        yield Case(f"{kind} 256", recurrent(kind, 256), (32, 32, 256))
    layers = {}

    def transformer(x):
        if x.dtype not in layers:
            layers[x.dtype] = torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True).to(
                x.dtype
            )
        return layers[x.dtype](x)

    yield Case("transformer layer", transformer, (16, 64, 256))


def recurrent(kind, width):
    """A recurrent layer as a function of its input, one instance per dtype."""
    layers = {}

    def call(x):
        if x.dtype not in layers:
            layers[x.dtype] = getattr(torch.nn, kind)(width, width).to(x.dtype)
        return layers[x.dtype](x)[0]

    return call


def best_ms(function, budget=0.1, runs=9):
    """Shortest time of one call in milliseconds, of up to `runs` within `budget` seconds.

    The shortest, because what else the machine does only ever adds. The first call warms up; it
    counts when it alone takes more than the budget.
    """
    times = []
    start = time.perf_counter()
    while len(times) < runs + 1 and (len(times) != 1 or times[0] < budget):
        before = time.perf_counter()
        function()
        times.append(time.perf_counter() - before)
        if len(times) > 3 and time.perf_counter() - start > budget:
            break
    return min(times[1:] or times) * 1e3


def measure(case, dtype, layout):
    """(forward ms, backward ms) of a case."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape).mul_(0.1).to(dtype) for shape in case.shapes]
    if layout == "channels_last":
        inputs = [
            t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in inputs
        ]
    inputs = [t.requires_grad_() for t in inputs]
    forward = best_ms(lambda: case.call(*inputs))
    output = case.call(*inputs)
    gradient = torch.ones_like(output)  # keeps the layout of the output
    backward = best_ms(
        lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True, allow_unused=True)
    )
    return forward, backward


def hardware():
    """CPU name, threads, and what oneDNN may use of it."""
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            name = next((s.split(":")[1].strip() for s in file if s.startswith("model name")), name)
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "all")
    return f"{name}, {torch.get_num_threads()} threads, oneDNN ISA {limit}"


def main():
    """Runs the survey, prints what is slow, writes the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--csv", default="half_ops.csv")
    parser.add_argument("--torch", action="store_true", help="leave torch's kernels in place")
    parser.add_argument("--only", default="", help="measure operations whose name holds this text")
    parser.add_argument("--shapes", nargs="+", default=list(ACTIVATIONS), choices=ACTIVATIONS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--slow", type=float, default=10.0, help="ratio from which an operation is printed"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    mended = cpu_half_ops is not None and not options.torch
    if mended:
        cpu_half_ops()
    fields = [
        "op",
        "direction",
        "layout",
        "dtype",
        "fp32_ms",
        "half_ms",
        "ratio",
        "ampfuse",
        "hardware",
        "torch",
    ]
    rows = []
    with open(options.csv, "w", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        for case in cases(options.shapes):
            if options.only not in case.name:
                continue
            for layout in case.layouts:
                full = measure(case, torch.float32, layout)
                for dtype in (torch.float16, torch.bfloat16):
                    try:
                        half = measure(case, dtype, layout)
                    except RuntimeError as error:  # no half kernel at all: nothing to be slow
                        print(f"{case.name} {dtype}: {str(error).splitlines()[0]}", file=sys.stderr)
                        continue
                    for direction, a, b in zip(("forward", "backward"), full, half, strict=True):
                        values = (
                            case.name, direction, layout, str(dtype)[6:],
                            f"{a:.4f}", f"{b:.4f}", f"{b / a:.2f}",
                            "on" if mended else "off",
                            hardware(), torch.__version__,
                        )  # fmt: skip
                        row = dict(zip(fields, values, strict=True))
                        writer.writerow(row)
                        rows.append(row)
                        if b / a >= options.slow:
                            print(
                                f"{b / a:8.1f}x  {a:9.3f} -> {b:9.3f} ms  {row['dtype']:8s} "
                                f"{direction:8s} {layout:13s} {case.name}"
                            )
                        sys.stdout.flush()
    print(f"{len(rows)} measurements, {options.csv}")


if __name__ == "__main__":
    main()
