"""Whole training steps of what people train, under torch's mixed precision and under ampfuse's.

    python benchmarks/nets.py [--device cuda] [--only gpt ...] [--quick] [--no-compile] [--parts]
    python benchmarks/nets.py --host

A step is forward pass, loss, backward pass and update on one batch of random data: AdamW for what
has attention or an LSTM, SGD with momentum for nets with batch norms, images in channels-last
memory. Arms, each in a process of its own (on a GPU torch's in one, ours in another):

    FP32                  torch, torch's fused optimizer
    torch.amp             torch.autocast in BF16, torch's fused optimizer
    torch.amp, compiled   the same under torch.compile
    O4                    amp.initialize: autocast in BF16, ampfuse's optimizer
    O5                    amp.initialize: a BF16 model with FP32 masters, fused
    O5, compiled          the same under torch.compile
    O5, unfused           without ampfuse.nn.fuse
    O5, torch's loss      --parts: with F.cross_entropy of FP32 logits; likewise "O5, torch's
                          norms", "activations", "attention" and "patches"
    O5, clipped           --parts: with ampfuse's clip_grad_norm_; "O5, torch's clipping": by
                          torch.nn.utils, of the masters' gradients
    O5, recomputed        fused, under ampfuse.nn.recompute_norms; nets with batch norms
    O2                    as O5, in FP16; on a GPU
    O5, graphed           the whole step as one CUDA graph; on a GPU

Torch's never import ampfuse. "products", "attention" and "convolutions" are what these take of a
step of O5, by the profiler: no fusion shortens them. The column memory_mib has the peak of a step's
tensors.

With --host it is the host's time, on one thread, for nets whose kernels are next to nothing (see
step.py), at O1 and under torch.amp in FP16: 37 linear layers of width 8, and 6 encoder layers of
width 16.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

# oneDNN keeps 1,024 primitives by default, and what does not fit is compiled again in every step.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler's word on earlier memory
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
import torch.nn.functional as F
from harness.measuring import Clock, HostClock, Worker, WorkerError, measure
from harness.models import image_model, text_model, tiny_model
from harness.results import Results, Row, options_of, rows_of
from torch import Tensor, nn
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
TINY = "mlp", "transformer"
FUSED = "norms", "activations", "attention", "patches"
WORDS = 16384


def size_of(net: str, device: torch.device) -> tuple[int, int]:
    """Side (or tokens) and batch."""
    side, *batches = NETS[net]
    return side, batches[device.type == "cuda"]


def optimizer_of(net: str) -> str:
    return "SGD" if net in (*NORMED, *TINY) else "AdamW"


class Step:
    """FP32, and what the other arms change of it."""

    fused: bool | None = True  # torch's optimizers

    def __init__(self, net: str, quick: bool, device: torch.device) -> None:
        torch.manual_seed(0)
        side, batch = size_of(net, device) if net in NETS else (0, 0)
        if quick:
            side, batch = side if net.startswith("vit") else min(side, 32), 2
        labels: tuple[int, ...] = (batch,)
        if net in TINY:
            self.model, shape = tiny_model(net)
            self.x, labels, classes = torch.randn(shape, device=device), shape[:-1], shape[-1]
        elif net in TEXTS:
            self.model, classes = text_model(net, WORDS, side)
            self.x = torch.randint(WORDS, (batch, side), device=device)
            labels = labels if net == "bert_small" else (batch, side)
        else:
            self.model, classes = image_model(net, side, classes=100), 100
            self.model.to(memory_format=torch.channels_last)
            x = torch.randn(batch, 3, side, side, device=device)
            self.x = x.contiguous(memory_format=torch.channels_last)
        self.model.to(device)
        self.y = torch.randint(classes, labels, device=device)
        params = self.model.parameters()
        if optimizer_of(net) == "SGD":
            options = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4}
            self.optimizer = torch.optim.SGD(params, fused=self.fused, **options)
        else:
            self.optimizer = torch.optim.AdamW(params, lr=1e-4, fused=self.fused)

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
    def __init__(self, *arguments: Any, half: str = "bfloat16", compiled: bool = False) -> None:
        super().__init__(*arguments)
        self.half = getattr(torch, half)
        self.scaler = torch.amp.GradScaler(self.x.device.type, enabled=half == "float16")
        if compiled:
            self.model.compile()

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.x.device.type, dtype=self.half):
            loss = self.loss()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Ours(Step):
    """O5, and what our other arms change of it.

    Arguments:
        fuse: what of the net is fused.
        clip: whose clipping there is, "torch's" or "ours".
    """

    fused = None

    def __init__(
        self,
        *arguments: Any,
        level: str = "O5",
        fuse: Sequence[str] = FUSED,
        clip: str = "",
        torchs_loss: bool = False,
        recompute: bool = False,
        compiled: bool = False,
    ) -> None:
        import ampfuse

        super().__init__(*arguments)
        self.amp, self.clip, self.torchs_loss = ampfuse.amp, clip, torchs_loss
        self.forward: Callable[[], Any] = ampfuse.nn.recompute_norms if recompute else nullcontext
        ampfuse.nn.fuse(self.model, fuse)
        self.model, self.optimizer = self.amp.initialize(
            self.model, self.optimizer, opt_level=level, verbosity=0
        )
        if compiled:
            self.model.compile()

    def loss(self) -> Tensor:
        with self.forward():
            output = self.model(self.x)
            return loss_of(output.float() if self.torchs_loss else output, self.y)

    def step(self) -> None:
        self.optimizer.zero_grad()
        with self.amp.scale_loss(self.loss(), self.optimizer) as scaled:
            scaled.backward()
        if self.clip == "ours":
            self.amp.clip_grad_norm_(self.optimizer, 1.0)
        elif self.clip:
            nn.utils.clip_grad_norm_(self.amp.master_params(self.optimizer), 1.0)
        self.optimizer.step()


class Graphed(Ours):
    def __init__(self, *arguments: Any) -> None:
        from ampfuse.graphs import make_graphed_step

        super().__init__(*arguments)
        batch = self.x, self.y
        self.graphed = make_graphed_step(self.model, loss_of, self.optimizer, batch)

    def __call__(self) -> object:
        return self.graphed(self.x, self.y)


class Share(Ours):
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


Arms = dict[str, Callable[..., Step]]
TORCHS: Arms = {
    "FP32": Step,
    "torch.amp": TorchAmp,
    "torch.amp, compiled": partial(TorchAmp, compiled=True),
}
OURS: Arms = {
    "O4": partial(Ours, level="O4", fuse=()),
    "O5": Ours,
    "O5, compiled": partial(Ours, compiled=True),
    "O5, unfused": partial(Ours, fuse=()),
    "O5, recomputed": partial(Ours, recompute=True),
    "O2": partial(Ours, level="O2"),
    "O5, graphed": Graphed,
}
PARTS: Arms = {
    "O5, torch's loss": partial(Ours, torchs_loss=True),
    **{
        f"O5, torch's {part}": partial(Ours, fuse=[other for other in FUSED if other != part])
        for part in FUSED
    },
    "O5, clipped": partial(Ours, clip="ours"),
    "O5, torch's clipping": partial(Ours, clip="torch's"),
}
HOST: Arms = {
    "torch.amp": partial(TorchAmp, half="float16"),
    "FP32": Step,
    "ampfuse O1": partial(Ours, level="O1", fuse=()),
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


def arms_of(net: str, options: Any) -> Arms:
    if options.host:
        return HOST
    left_out = ["O5, torch's activations" if net in NORMED else "O5, recomputed"]
    left_out += ["torch.amp, compiled", "O5, compiled"] * options.no_compile
    left_out += ["O2", "O5, graphed"] * (options.device.type == "cpu")
    arms = TORCHS | OURS | (PARTS if options.parts else {})
    return {name: arm for name, arm in arms.items() if name not in left_out}


def rows(net: str, options: Any) -> Iterator[list[Row]]:
    """Of all arms and shares of one net: in turns, and on a GPU, which one may fill, in a row. What
    was measured together comes together, so that a run that is cut off leaves what it has."""
    device, arguments = options.device, (net, options.quick, options.device)
    case = f"{net}-step" if options.host else "-".join(map(str, (net, *size_of(net, device))))
    arms, shares, optimizer = arms_of(net, options), {}, optimizer_of(net)
    if not options.host:
        shares = {kind: partial(Share, kind) for kind in KINDS}
    repeats = options.repeats if options.quick or not options.host else max(options.repeats, 200)
    with ExitStack() as processes:

        def process(ours: bool) -> Worker:
            clock = HostClock if options.host else Clock
            return processes.enter_context(Worker(clock, device, with_ampfuse=ours))

        in_a_row = device.type == "cuda" and not options.host
        of_all = {ours: process(ours) for ours in (False, True)} if in_a_row else {}
        workers = {}
        for name in arms:
            ours = name.startswith(("O", "ampfuse"))
            workers[name] = of_all.get(ours) or process(ours)
        workers |= dict.fromkeys(shares, of_all.get(True) or process(True))
        made = arms | shares
        for group in [[name] for name in made] if in_a_row else [[*made]]:
            try:
                steps = {name: workers[name].variant(made[name], *arguments) for name in group}
                # (A GPU's profiler takes a second for each.)
                few = in_a_row and group[0] in shares
                times = measure(steps, 3, 1) if few else measure(steps, repeats)
                memory = {arm: steps[arm].memory_mib() for arm in group if arm in arms}
                times = {name: values for name, values in times.items() if any(values)}
                yield rows_of(device, times, memory_mib=memory, case=case, optimizer=optimizer)
            except WorkerError as error:  # keeps no other from being measured
                print(f"{case:28s} {', '.join(group)}: not run ({error})")
            for name in group if in_a_row else ():
                workers[name].clear()


def main() -> None:
    """Measures all arms of each net, at most threads, and writes the CSV."""
    options = options_of(
        __doc__,
        "nets",
        no_compile="leave out torch.compile",
        parts="also O5 without one part of the fusing, and with clipping",
        host="the host's time for tiny nets, on one thread",
    )
    torch.set_num_threads(options.threads[-1])
    results = Results(options)
    for net in TINY if options.host else NETS:
        for measured in rows(net, options) if results.want(net) else ():
            results.add(measured)
    results.finish()


if __name__ == "__main__":
    main()
