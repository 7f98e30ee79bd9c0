"""Whole training steps of what people train, under torch's mixed precision and under ampfuse's.

    python benchmarks/nets.py [--device cuda] [--only gpt ...] [--quick] [--no-compile] [--parts]

A step is forward pass, loss, backward pass and update on one batch of random data: AdamW for what
has attention or an LSTM, SGD with momentum for nets with batch norms, images in channels-last
memory. Arms, each in a process of its own (on a GPU torch's in one, ours in another):

    FP32                  torch, torch's fused optimizer
    torch.amp             torch.autocast in BF16, torch's fused optimizer
    torch.amp, compiled   the same under torch.compile
    O4                    amp.initialize: autocast in BF16, ampfuse's optimizer
    O5                    amp.initialize: a BF16 model with FP32 masters, fused
    O5, unfused           without ampfuse.nn.fuse
    O5, torch's loss      --parts: with F.cross_entropy of FP32 logits; likewise "O5, torch's norms"
                          and "O5, torch's activations"
    O5, recomputed        fused, under ampfuse.nn.recompute_norms; nets with batch norms
    O2                    as O5, in FP16; on a GPU
    O5, graphed           the whole step as one CUDA graph; on a GPU

Torch's never import ampfuse. "products", "attention" and "convolutions" are what these take of a
step of O5, by the profiler: no fusion shortens them. The column memory_mib has the peak of a step's
tensors.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

# oneDNN keeps 1,024 primitives by default, and what does not fit is compiled again in every step.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler's word on earlier memory
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.nn.functional as F
from harness.measuring import Clock, Worker, WorkerError, measure
from harness.models import build, text_model
from harness.results import Results, Row, options_of, rows_of
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import profile

# A net's side of the images, or tokens of a text, and its batch on a CPU and on a GPU.
NETS = {
    "gpt": (256, 8, 64),  # 6 layers of 384, 16,384 words
    "bert_small": (128, 16, 256),  # 4 layers of 512 (Turc et al. 2019), two classes
    "vit_small_patch16_224": (224, 8, 256),
    "convnext_tiny": (224, 8, 128),
    "lstm_tagger": (64, 32, 256),  # two bidirectional layers of 256
    "resnet18": (224, 16, 256),
    "resnet50": (224, 8, 256),
    "vgg16": (32, 64, 1024),
    "wrn16_4": (32, 64, 1024),
    "seresnext50_32x4d": (32, 32, 512),
    "densenet161": (32, 32, 512),
}
TEXTS = "gpt", "bert_small", "lstm_tagger"
NORMED = "resnet18", "resnet50", "vgg16", "wrn16_4", "seresnext50_32x4d", "densenet161"
WORDS = 16384


def size_of(net: str, device: torch.device) -> tuple[int, int]:
    """Side (or tokens) and batch."""
    side, *batches = NETS[net]
    return side, batches[device.type == "cuda"]


class Step:
    """FP32, and what the other arms change of it."""

    fused: bool | None = True  # torch's optimizers

    def __init__(self, net: str, quick: bool, device: torch.device) -> None:
        torch.manual_seed(0)
        side, batch = size_of(net, device)
        if quick:
            side, batch = side if net.startswith("vit") else min(side, 32), 2
        if net in TEXTS:
            self.model, classes = text_model(net, WORDS, side)
            self.x = torch.randint(WORDS, (batch, side), device=device)
            labels = (batch,) if net == "bert_small" else (batch, side)
        else:
            self.model, classes = build(net, classes=100), 100
            self.model.to(memory_format=torch.channels_last)
            x = torch.randn(batch, 3, side, side, device=device)
            self.x, labels = x.contiguous(memory_format=torch.channels_last), (batch,)
        self.model.to(device)
        self.y = torch.randint(classes, labels, device=device)
        params = self.model.parameters()
        if net in NORMED:
            options = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4}
            self.optimizer = torch.optim.SGD(params, fused=self.fused, **options)
        else:
            self.optimizer = torch.optim.AdamW(params, lr=1e-4, fused=self.fused)
        self.set_up()

    def set_up(self) -> None:
        pass

    def prepare(self) -> None:
        """The step before, as in training: the first one after a while of waiting takes longer."""
        self.step()

    def __call__(self) -> object:
        self.step()

    def loss(self) -> Tensor:
        return loss_of(self.model(self.x), self.y)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


class TorchAmp(Step):
    def loss(self) -> Tensor:
        with torch.autocast(self.x.device.type, dtype=torch.bfloat16):
            return super().loss()


class Compiled(TorchAmp):
    def set_up(self) -> None:
        self.model.compile()


class O5(Step):
    fused = None
    level, fuse = "O5", True

    def set_up(self) -> None:
        from ampfuse import amp

        self.amp = amp
        options = {"opt_level": self.level, "fuse": self.fuse}
        self.model, self.optimizer = amp.initialize(
            self.model, self.optimizer, verbosity=0, **options
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        with self.amp.scale_loss(self.loss(), self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()


class O4(O5):
    level, fuse = "O4", False


class Unfused(O5):
    fuse = False


class TorchLoss(O5):
    def loss(self) -> Tensor:
        return loss_of(self.model(self.x).float(), self.y)


class TorchNorms(O5):
    fuse, parts = False, ("activations",)

    def set_up(self) -> None:
        from ampfuse.nn import fuse

        fuse(self.model, self.parts)
        super().set_up()


class TorchActivations(TorchNorms):
    parts = ("norms",)


class Recomputed(O5):
    def loss(self) -> Tensor:
        from ampfuse.nn import recompute_norms

        with recompute_norms():
            return super().loss()


class O2(O5):
    level = "O2"


class Graphed(O5):
    def set_up(self) -> None:
        from ampfuse.graphs import make_graphed_step

        super().set_up()
        batch = self.x, self.y
        self.graphed = make_graphed_step(self.model, loss_of, self.optimizer, batch)

    def __call__(self) -> object:
        return self.graphed(self.x, self.y)


class Share(O5):
    """Milliseconds that operations of one kind take of a step."""

    def __init__(self, kind: str, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.names = KINDS[kind]

    def __call__(self) -> float:  # its own measure, see `Variant`
        with profile() as profiled:
            self.step()
        time = "self_device_time_total" if self.x.is_cuda else "self_cpu_time_total"
        return sum(getattr(e, time) for e in profiled.key_averages() if self.has(e)) / 1e3

    def has(self, event: Any) -> bool:
        """Of operations: a GPU's kernels are events, too, and their time is that of those."""
        of_host = event.device_type == DeviceType.CPU
        return of_host and any(name in event.key for name in self.names)


ARMS: dict[str, type[Step]] = {
    "FP32": Step,
    "torch.amp": TorchAmp,
    "torch.amp, compiled": Compiled,
    "O4": O4,
    "O5": O5,
    "O5, unfused": Unfused,
    "O5, torch's loss": TorchLoss,
    "O5, torch's norms": TorchNorms,
    "O5, torch's activations": TorchActivations,
    "O5, recomputed": Recomputed,
    "O2": O2,
    "O5, graphed": Graphed,
}
# Parts of the names of torch's operations, on the CPU as on GPUs.
KINDS = {
    "products": (
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "mkldnn_linear",
        "gemm",
        "lstm",
        "mkldnn_rnn",
    ),
    "attention": ("attention", "flash_"),
    "convolutions": ("convolution", "half_conv", "conv2d"),
}


def arms_of(net: str, options: Any) -> dict[str, type[Step]]:
    left_out: set[type[Step]] = {TorchActivations if net in NORMED else Recomputed}
    left_out |= {Compiled} if options.no_compile else set()
    left_out |= set() if options.parts else {TorchLoss, TorchNorms, TorchActivations}
    left_out |= {O2, Graphed} if options.device.type == "cpu" else set()
    return {arm: kind for arm, kind in ARMS.items() if kind not in left_out}


def rows(net: str, options: Any) -> list[Row]:
    """Of all arms and shares of one net: in turns, and on a GPU, which one may fill, in a row."""
    arguments, arms = (net, options.quick, options.device), arms_of(net, options)
    case = "-".join(map(str, (net, *size_of(net, options.device))))
    times: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    with ExitStack() as processes:

        def process(ours: bool) -> Worker:
            return processes.enter_context(Worker(Clock, options.device, with_ampfuse=ours))

        in_a_row = options.device.type == "cuda"
        of_all = {ours: process(ours) for ours in (False, True)} if in_a_row else {}
        workers = {
            arm: of_all.get(issubclass(kind, O5)) or process(issubclass(kind, O5))
            for arm, kind in arms.items()
        }
        workers |= dict.fromkeys(KINDS, of_all.get(True) or process(True))
        names = [*arms, *KINDS]
        for group in [[name] for name in names] if in_a_row else [names]:
            try:
                steps = {
                    name: workers[name].variant(ARMS[name], *arguments)
                    if name in arms
                    else workers[name].variant(Share, name, *arguments)
                    for name in group
                }
                # (A GPU's profiler takes a second for each.)
                few = in_a_row and group[0] in KINDS
                times |= measure(steps, 3, 1) if few else measure(steps, options.repeats)
                memory |= {arm: steps[arm].memory_mib() for arm in group if arm in arms}
            except WorkerError as error:  # keeps no other from being measured
                print(f"{case:28s} {', '.join(group)}: not run ({error})")
            for name in group if in_a_row else ():
                workers[name].clear()
    times = {name: values for name, values in times.items() if any(values)}
    optimizer = "SGD" if net in NORMED else "AdamW"
    return rows_of(options.device, times, memory_mib=memory, case=case, optimizer=optimizer)


def main() -> None:
    """Measures all arms of each net, at all threads, and writes the CSV."""
    options = options_of(
        __doc__,
        "nets",
        no_compile="leave out torch.compile",
        parts="also O5 without one part of the fusing",
    )
    results = Results(options)
    for net in NETS:
        if results.want(net):
            results.add(rows(net, options))
    results.finish()


if __name__ == "__main__":
    main()
