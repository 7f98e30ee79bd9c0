"""Whole training steps of common models, under torch's mixed precision and under ampfuse's.

    python benchmarks/nets.py [--device cuda] [--only gpt ...] [--quick] [--parts]
    python benchmarks/nets.py --host             # the host's time, of tiny models

docs/benchmarks.md describes the variants. The column memory_mib has the peak of a step's tensors.
Rows of other models that the CSV has stay there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache, partial
from itertools import product
from operator import methodcaller
from types import MappingProxyType
from typing import Any

import harness.environment  # noqa: F401 - before torch, which reads the environment
import torch
import torch.nn.functional as F
from harness.measuring import Worker, WorkerError, measure
from harness.models import TEXTS, image_model, text_model, tiny_model
from harness.options import options_of
from harness.results import Results, Row, rows_of
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import profile

# Name, side of the images or tokens of a text, batch on a CPU (0: not measured there) and on a GPU.
# They are measured in this order.
NETWORKS = {
    "gpt2": ("GPT-2 124M", 1024, 0, 16),
    "gpt": ("GPT", 256, 8, 64),
    "vit_small_patch16_224": ("ViT-S/16", 224, 8, 256),
    "resnet50": ("ResNet-50", 224, 8, 256),
    "llama": ("Llama 148M", 1024, 0, 16),
    "convnext_tiny": ("ConvNeXt-T", 224, 8, 128),
    "bert_base": ("BERT-base", 128, 0, 256),
    "bert_small": ("BERT-small", 128, 16, 256),
    "lstm_tagger": ("LSTM tagger", 64, 32, 256),
    "resnet18": ("ResNet-18", 224, 16, 256),
    "vgg16": ("VGG16", 32, 64, 1024),
    "wrn16_4": ("WRN-16-4", 32, 64, 1024),
    "seresnext50_32x4d": ("SE-ResNeXt50", 32, 32, 512),
    "densenet161": ("DenseNet-161", 32, 32, 512),
}
NORMED = "resnet18", "resnet50", "vgg16", "wrn16_4", "seresnext50_32x4d", "densenet161"
TINY = "mlp", "transformer"
LANGUAGE = "gpt", "gpt2", "llama"


def size_of(network: str, quick: bool, kind: str) -> tuple[int, int]:
    """Side (or tokens) and batch."""
    _, side, *batches = NETWORKS[network]
    if quick:
        return side if network.startswith("vit") else min(side, 32), 2
    on_cpu, on_gpu = batches
    return side, on_gpu if kind == "cuda" else on_cpu


def case_of(network: str, options: Any) -> str:
    if options.host:
        return f"{network}-step"
    side, batch = size_of(network, options.quick, options.device.type)
    size = f"sequence {side}" if network in TEXTS else f"{side}x{side}"
    return f"{NETWORKS[network][0]} (batch {batch}, {size})"


def optimizer_of(network: str) -> str:
    return "SGD" if network in (*NORMED, *TINY) else "AdamW"


def model_and_batch(network: str, quick: bool, kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, inputs and classes, on torch's default device; a batch of the size for `kind`."""
    if network in TINY:
        model, shape = tiny_model(network)
        return model, torch.randn(shape), torch.randint(shape[-1], shape[:-1])
    side, batch = size_of(network, quick, kind)
    labels: tuple[int, ...] = (batch,)
    if network in TEXTS:
        model, vocab_size, classes = text_model(network, side, small=quick)
        labels = labels if network.startswith("bert") else (batch, side)
        return model, torch.randint(vocab_size, (batch, side)), torch.randint(classes, labels)
    model, layout = image_model(network, side, classes=100), torch.channels_last
    x = torch.randn(batch, 3, side, side).contiguous(memory_format=layout)
    return model.to(memory_format=layout), x, torch.randint(100, labels)


class Step:
    """FP32, which the other variants change. `cast` is applied to the output before the loss."""

    fused: bool | None = True  # torch's optimizers

    def __init__(
        self,
        network: str,
        quick: bool,
        device: torch.device,
        cast: Callable[..., Tensor] | None = None,
    ) -> None:
        self.cast, self.device = cast, device
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        with device:
            self.make_model(network, quick)
        self.optimizer = self.make_optimizer(network)

    def make_model(self, network: str, quick: bool) -> None:
        """The model and a batch."""
        self.model, self.x, self.y = model_and_batch(network, quick, self.device.type)

    def make_optimizer(self, network: str) -> Any:
        params = self.model.parameters()
        if optimizer_of(network) == "AdamW":
            return torch.optim.AdamW(params, lr=1e-4, fused=self.fused)
        options = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4}
        return torch.optim.SGD(params, fused=self.fused, **options)

    def prepare(self) -> None:
        """The step before, as in training: the first one after a while of waiting takes longer."""
        self.step()

    def __call__(self) -> object:
        self.step()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        output = self.model(x)
        return loss_of(output if self.cast is None else self.cast(output), y)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip(self) -> None:
        """Nothing here."""

    def update(self) -> None:
        self.optimizer.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward(self.loss(self.x, self.y))
        self.clip()
        self.update()


def loss_of(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


class TorchAmp(Step):
    """Autocast; `compiled` is the model. `expert`: model and loss are compiled as one function, in
    that mode, and models of transformers get no mask."""

    def __init__(
        self,
        *arguments: Any,
        half: str = "bfloat16",
        compiled: bool = False,
        expert: str = "",
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.half = getattr(torch, half)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=half == "float16")
        if compiled:
            self.model.compile()
        if expert:
            getattr(self.model, "use_no_masks", lambda: None)()
            self.loss = torch.compile(self.loss, mode=expert)  # type: ignore[method-assign]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=self.half):
            return super().loss(x, y)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class AmpfuseStep(Step):
    """O5, which our other variants change. `unfused` are parts that are not fused, `clip` is
    "torch's" or "ours", `compiled` is "model", or "loss" for model and loss as one function, and
    `memory` has options of `amp.initialize` and of parameter groups."""

    fused = None

    def __init__(
        self,
        *arguments: Any,
        level: str = "O5",
        fuse: bool = True,
        unfused: Collection[str] = (),
        clip: str = "",
        recompute: bool = False,
        compiled: str = "",
        memory: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        import ampfuse
        from ampfuse.nn.fuse import PARTS

        super().__init__(*arguments, **options)
        self.amp, self.clipping = ampfuse.amp, clip
        self.forward: Callable[[], Any] = ampfuse.nn.recompute_norms if recompute else nullcontext
        if fuse:
            ampfuse.nn.fuse(self.model, [part for part in PARTS if part not in unfused])
        for group in self.optimizer.param_groups:
            group |= {name: memory[name] for name in memory if name != "master_weights"}
        masters = memory.get("master_weights")
        self.model, self.optimizer = self.amp.initialize(
            self.model, self.optimizer, opt_level=level, master_weights=masters, verbosity=0
        )
        if compiled == "model":
            self.model.compile()
        elif compiled:
            self.loss = torch.compile(self.loss)  # type: ignore[method-assign]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with self.forward():
            return super().loss(x, y)

    def backward(self, loss: Tensor) -> None:
        with self.amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()

    def clip(self) -> None:
        if self.clipping == "ours":
            self.amp.clip_grad_norm_(self.optimizer, 1.0)
        elif self.clipping:
            nn.utils.clip_grad_norm_(self.amp.master_params(self.optimizer), 1.0)


class Captured(AmpfuseStep):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        from ampfuse.graphs import make_graphed_step

        super().__init__(*arguments, **options)
        batch = self.x, self.y
        self.captured = make_graphed_step(self.model, loss_of, self.optimizer, batch)

    def __call__(self) -> object:
        return self.captured(self.x, self.y)


class Share(AmpfuseStep):
    """What operations of one kind take of a step."""

    def __init__(self, kind: str, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.names = KINDS[kind]

    def milliseconds(self) -> float:
        with profile() as profiled:
            self.step()
        time = "self_device_time_total" if self.x.is_cuda else "self_cpu_time_total"
        return sum(getattr(e, time) for e in profiled.key_averages() if self.has(e)) / 1e3

    def has(self, event: Any) -> bool:
        """Whether it is an operation: a GPU's kernels are events, too, with the same time."""
        of_host = event.device_type == DeviceType.CPU
        return of_host and any(name in event.key for name in self.names)


Variants = dict[str, Callable[..., Step]]
# The variants of the tables come first.
VARIANTS: Variants = {
    "torch.amp, expert": partial(TorchAmp, expert="default"),
    "O5": AmpfuseStep,
    "O5, compiled": partial(AmpfuseStep, compiled="model"),
    "torch.amp": TorchAmp,
    "torch.amp, compiled": partial(TorchAmp, compiled=True),
    "FP32": Step,
}
ON_GPU: Variants = {
    "O5, compiled and captured": partial(Captured, compiled="model"),
    "O5, captured": Captured,
    "torch.amp, expert, captured": partial(TorchAmp, expert="reduce-overhead"),
}
MORE: Variants = {
    "torch.amp, .float() loss": partial(TorchAmp, cast=Tensor.float),
    "O5, .float() loss": partial(AmpfuseStep, cast=Tensor.float),
    "O4": partial(AmpfuseStep, level="O4", fuse=False),
    "O5, unfused": partial(AmpfuseStep, fuse=False),
    "O5, recomputed": partial(AmpfuseStep, recompute=True),
}
PARTS: Variants = {
    "O5, torch's loss": partial(AmpfuseStep, cast=methodcaller("as_subclass", Tensor)),
    **{
        f"O5, torch's {part}": partial(AmpfuseStep, unfused=[part])
        for part in ("norms", "activations")
    },
    "O5, clipped": partial(AmpfuseStep, clip="ours"),
    "O5, torch's clipping": partial(AmpfuseStep, clip="torch's"),
}
HOST: Variants = {
    "torch.amp": partial(TorchAmp, half="float16"),
    "FP32": Step,
    "ampfuse O1": partial(AmpfuseStep, level="O1", fuse=False),
}
# Parts of the names of torch's operations, on the CPU as on GPUs.
KINDS = {
    "products": ("::mm", "::addmm", "::bmm", "mkldnn_linear", "gemm", "lstm", "mkldnn_rnn"),
    "attention": ("attention", "flash_"),
    "convolutions": ("convolution", "half_conv", "conv2d"),
}


def variants_of(network: str, options: Any) -> Variants:
    """The variants of the tables first, then all others and the shares."""
    if options.host:
        return HOST
    on_gpu = options.device.type == "cuda"
    variants = VARIANTS | (ON_GPU if on_gpu else {}) | MORE | (PARTS if options.parts else {})
    if on_gpu:
        variants["O2"] = partial(AmpfuseStep, level="O2")
    left_out = ["O5, torch's activations" if network in NORMED else "O5, recomputed"]
    if network not in LANGUAGE:
        left_out += [name for name in variants if ".float()" in name]
    variants = {name: variant for name, variant in variants.items() if name not in left_out}
    return variants | {kind: partial(Share, kind) for kind in KINDS}


def groups_of(networks: Sequence[str], options: Any) -> Iterator[tuple[str, Variants]]:
    """Networks, with variants that are measured in turns. A GPU's memory one variant may fill, so
    each is measured alone, those of the tables first."""
    variants = {network: variants_of(network, options) for network in networks}
    if not options.alone:
        yield from variants.items()
        return
    in_tables = VARIANTS | ON_GPU
    for first, network in product((True, False), networks):
        for name, make in variants[network].items():
            if (name in in_tables) == first:
                yield network, {name: make}


def rows(
    network: str, variants: Variants, options: Any, worker_of: Callable[[str], Worker]
) -> list[Row]:
    """The rows of one network, of those variants that ran."""
    device, case = options.device, case_of(network, options)
    workers = {name: worker_of("O5, shares" if name in KINDS else name) for name in variants}
    steps = {}
    for name, make in variants.items():
        try:
            step = workers[name].variant(make, network, options.quick, device)
            step()  # compiles it
            steps[name] = step
        except WorkerError as error:  # keeps no other from being measured
            print(f"{case:28s} {name}: not run ({error})")
    repeats = options.repeats if options.quick or not options.host else max(options.repeats, 200)
    if options.alone and not variants.keys().isdisjoint(KINDS):
        repeats = 3  # a GPU's profiler takes a second for each
    times, memory = {}, {}
    try:
        times = measure(steps, repeats, 1)
        # What a graph allocates, the allocator counts at its capture alone.
        with_memory = [name for name in steps if name not in KINDS and "captured" not in name]
        memory = {name: steps[name].memory_mib() for name in with_memory}
    except WorkerError as error:
        print(f"{case:28s} {', '.join(steps)}: not run ({error})")
        times = {}
    for name in variants:
        workers[name].clear()
    times = {name: values for name, values in times.items() if any(values)}
    return rows_of(device, times, memory_mib=memory, case=case, optimizer=optimizer_of(network))


def main() -> None:
    """Measures all variants of each network on all threads, and writes the CSV."""
    options = options_of(
        __doc__,
        "nets",
        parts="also O5 without one part of the fusing, and with clipping",
        host="the host's time for tiny networks, on one thread",
    )
    torch.set_num_threads(options.threads[-1])
    results, kind = Results(options), options.device.type
    options.alone = kind == "cuda" and not options.host
    measured_here = [n for n in NETWORKS if size_of(n, options.quick, kind)[1]]
    networks = [*filter(results.want, TINY if options.host else measured_here)]
    with ExitStack() as processes:

        @cache
        def worker_of(variant: str) -> Worker:
            ours = not variant.startswith(("torch", "FP32"))
            worker = Worker(options.device, host=options.host, with_ampfuse=ours)
            return processes.enter_context(worker)

        for network, variants in groups_of(networks, options):
            results.add(rows(network, variants, options, worker_of))
            if not options.alone:
                processes.close()  # their memory is for the next network
                worker_of.cache_clear()
    results.finish()


if __name__ == "__main__":
    main()
