"""The doctor's report: where a step's time goes, what its bottleneck is, and what would help."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import statistics
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import Optimizer

import ampfuse
from ampfuse import hardware
from ampfuse.devices import device_name
from ampfuse.doctor.profile import HALVES, LABELS, Event, Operation, Profile
from ampfuse.doctor.watch import Finished, Watch
from ampfuse.insight.reporting import Finding, figures, same_random_numbers
from ampfuse.measuring import StepClock
from ampfuse.optim.fused import FUSED

MIN_GAIN = 1.05  # below that, noise decides
# What may be the bottleneck of a step, with the kinds of work that count for each.
BOTTLENECKS = {
    "data loading": ("data",),
    "the host": ("python", "host", "sync"),
    "arithmetic": ("matrix",),
    "memory": ("norm", "reduction", "memory", "cast", "layout", "optimizer", "scaling"),
    "communication": ("communication",),
}


class Share(NamedTuple):
    """Time of one kind of work in a step; `label` tells kinds of matrix work apart."""

    kind: str
    label: str
    ms: float
    share: float


@dataclass
class Report:
    """The doctor's findings. Times are of one step without the profiler, in milliseconds.

    `problem` says in a line why there are none. `seen` counts optimizer steps. `step_ms` is the
    mean of `steps` timed steps, `profiled_ms` that of as many profiled ones. `shares` say where the
    time goes and sum up to `step_ms`, `operations` which take most, `syncs` which lines of the
    program synchronize with the device (or would, with a GPU), `attention` which backend computes
    it and how fast each is, and `advice` what would help.
    """

    script: str = ""
    problem: str | None = "nothing was measured yet"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seen: int = 0
    steps: int = 0
    step_ms: float = 0.0
    fastest_ms: float = 0.0
    slowest_ms: float = 0.0
    profiled_ms: float = 0.0
    shares: list[Share] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    syncs: list[str] = field(default_factory=list)
    attention: str = ""
    advice: list[Finding] = field(default_factory=list)
    optimizers: Collection[type[Optimizer]] = ()

    def share_of(self, *kinds: str) -> float:
        """The share of the step, 0 to 1, of all work of `kinds`."""
        return sum(share.share for share in self.shares if share.kind in kinds)

    def ms_of(self, *kinds: str) -> float:
        """Milliseconds of a step that all work of `kinds` takes."""
        return self.share_of(*kinds) * self.step_ms

    @property
    def bottleneck(self) -> str:
        """What takes most of the step: a key of ``BOTTLENECKS``."""
        return max(BOTTLENECKS, key=lambda name: self.share_of(*BOTTLENECKS[name]))

    @property
    def sentence(self) -> str:
        """The bottleneck as a sentence."""
        kind = max(BOTTLENECKS[self.bottleneck], key=self.share_of)
        share = f"{LABELS[kind]} takes {self.share_of(kind):.0%} of the time"
        rest = "" if self.advice else ". No change that the doctor knows would help"
        return f"bound by {self.bottleneck}: {share}{rest}"

    @property
    def half_limit(self) -> float:
        """The largest speedup by half precision, by Amdahl's law."""
        return self.gain_of(self.full_ms("matrix") + self.full_ms("memory", "norm") / 2)

    @property
    def bound(self) -> str:
        """The upper bound of what half precision gains, ``half_limit``, as a sentence."""
        share = self.full_ms("matrix") / (self.step_ms or 1.0)
        limit = f"At most {self.half_limit:.2f}x from half precision"
        return f"{limit}, if the FP32 matrix work ({share:.0%} of a step) took no time."

    @property
    def half_type(self) -> str:
        """The half type that the device computes in: "BF16", "FP16" or ""."""
        if self.is_on_gpu:
            return "BF16" if torch.cuda.get_device_capability(self.device) >= (8, 0) else "FP16"
        return "BF16" if hardware.cpu_has_bf16() else ""

    @property
    def is_on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def full_ms(self, *kinds: str) -> float:
        """The time of operations of `kinds` that are not in half precision."""
        full = (op for op in self.operations if op.event.precision not in HALVES)
        return sum(op.ms for op in full if op.kind in kinds)

    def gain_of(self, saved_ms: float) -> float:
        """The speedup of a step that takes `saved_ms` less."""
        left = max(self.step_ms - saved_ms, 0.01 * self.step_ms)
        return self.step_ms / left if left else 1.0  # nothing was measured

    def __str__(self) -> str:
        if self.problem:
            return f"ampfuse doctor: {self.problem}"
        lines = [
            f"{self.script}: {self.sentence}",
            f"\n{self.step_ms:.1f} ms a step (mean of {self.steps}, {self.fastest_ms:.1f} to "
            f"{self.slowest_ms:.1f}); {self.profiled_ms:.1f} under the profiler, whose shares are "
            f"scaled to the former. {device_name(self.device)}; torch {torch.__version__}, "
            f"ampfuse {ampfuse.__version__}\n",
        ]
        for _, label, ms, share in self.shares:
            if share >= 0.0005:
                bar = "#" * round(30 * share)
                lines.append(f"  {label:35} {share:6.1%} {ms:9.2f} ms  {bar}")
        lines.append("\nOperations that take most:")
        for op in self.operations[:5]:
            call = f"{op.calls:g} x {op.event.name} {op.shapes}"
            lines.append(f"  {op.ms:9.2f} ms  {call}".rstrip())
        lines += [f"\n{text}" for text in (self.bound, self.attention) if text]
        do = "synchronize" if self.is_on_gpu else "would synchronize with a GPU"
        lines += [f"\nLines that {do}, in a step:"] if self.syncs else []
        lines += [f"  {line}" for line in self.syncs[:10]]
        lines += ["\nWhat would help most:"] if self.advice else []
        for place, one in enumerate(self.advice[:5], 1):
            lines += [f"  {place}. {one.found}: {one.kind}", f"     {one.suggestion}"]
        return "\n".join(lines)


@contextlib.contextmanager
def examine(
    *, warmup: int = 5, steps: int = 10, stop: bool = False, script: str | None = None
) -> Iterator[Report]:
    """Report where the time of the training in this context goes::

        with ampfuse.doctor.examine() as report:
            for inputs, targets in loader:
                ...
        print(report)

    After `warmup` optimizer steps, `steps` are timed and as many profiled; in one more, lines that
    synchronize with the device are recorded. The report is complete at the end of the context. The
    training, its random numbers and its results stay as they are.

    Arguments:
        stop: leave the context after the last of these steps. Otherwise it goes on unwatched.
        script: the name in the report.

    Raises:
        ValueError: `warmup` or `steps` is less than 1. An error of the training passes through.
    """
    if min(warmup, steps) < 1:
        raise ValueError(f"warmup and steps must be at least 1, got {warmup} and {steps}")
    report = Report(script=script or Path(sys.argv[0]).name or "the training")
    watch = Watch(warmup, steps, stop)
    with watch, contextlib.suppress(Finished):
        yield report
    if watch.is_own_process():
        _complete(report, watch)


def _complete(report: Report, watch: Watch) -> None:
    """Fill in what `watch` saw, or the problem, if that was not enough."""
    report.seen, report.problem = watch.seen, watch.problem
    if report.problem or watch.profiler is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        watch.profiler.export_chrome_trace(str(path))
        profile = Profile(json.loads(path.read_text(errors="replace"))["traceEvents"])
    times = watch.milliseconds
    report.steps, report.step_ms = len(times), statistics.fmean(times)
    report.fastest_ms, report.slowest_ms = min(times), max(times)
    report.profiled_ms = profile.duration / profile.steps / 1e3
    report.device = watch.device
    report.optimizers = watch.optimizers
    report.syncs = watch.syncs.lines()
    report.operations = profile.operations
    for op in report.operations:
        op.ms *= report.step_ms / report.profiled_ms
    for kind in LABELS:
        for (_, detail), us in (item for item in profile.times.items() if item[0][0] == kind):
            label = f"{LABELS[kind]}, {detail}" if detail else LABELS[kind]
            share = us / profile.duration
            report.shares.append(Share(kind, label, share * report.step_ms, share))
    report.advice = [*find(report), *compare_attention(report, profile)]
    report.advice.sort(key=lambda one: -(one.gain or 0.0))


# --- what would help ------------------------------------------------------------------------------


def _half_ms(report: Report, name: str) -> float:
    """The milliseconds that half precision saves: half as many bytes; its units gain more, and
    small products less. 0 if the device does not compute in it, or matrix work takes little."""
    if report.half_type != name or report.full_ms("matrix") <= 0.1 * report.step_ms:
        return 0.0
    return report.full_ms("matrix", "memory", "norm") / 2


class Rule(NamedTuple):
    """A change, how to make it, and the milliseconds of a step that it saves.

    `estimate` is "at most" where these are the time of what is removed, as if nothing came in its
    place.
    """

    change: str
    suggestion: str
    saved: Callable[[Report], float]
    estimate: str = "at most"


RULES: tuple[Rule, ...] = (
    Rule(
        "faster loading",
        "DataLoader(num_workers=..., persistent_workers=True): one for each core, more if they "
        "wait for files; cheaper transforms",
        lambda report: report.ms_of("data"),
    ),
    Rule(
        "BF16 (O5)",
        'model, optimizer = amp.initialize(model, optimizer, opt_level="O5")',
        lambda report: _half_ms(report, "BF16"),
        "about",
    ),
    Rule(
        "FP16 (O2)",
        'model, optimizer = amp.initialize(model, optimizer, opt_level="O2")',
        lambda report: _half_ms(report, "FP16"),
        "about",
    ),
    Rule(
        "fused optimizer",
        "the one of the same name in ampfuse.optim, or opt_level O0: one pass over all parameters",
        lambda report: report.ms_of("optimizer") / 2 if FUSED.keys() & report.optimizers else 0.0,
        "about",
    ),
    Rule(
        "one launch for a whole step",
        "ampfuse.graphs.make_graphed_step(model, loss_fn, optimizer, batch): a CUDA graph; first "
        "remove the lines that synchronize",
        lambda report: report.ms_of("host") if report.is_on_gpu else 0.0,
    ),
    Rule(
        "less Python, fewer and larger operations",
        "move loading (into a DataLoader), logging and file access out of the step; larger "
        "batches; torch.compile(model)",
        lambda report: 0.0 if report.is_on_gpu else report.ms_of("host", "python"),
    ),
    Rule(
        "less communication",
        "overlap it with the backward pass (DistributedDataParallel), or send half precision",
        lambda report: report.ms_of("communication"),
    ),
    Rule(
        "fewer casts",
        "keep tensors in one type from the model's input to its output; O2 and O5 keep weights in "
        "half, where autocast casts them in every step",
        lambda report: report.ms_of("cast"),
    ),
    Rule(
        "fewer transpositions",
        "keep images in one memory format (in half precision channels_last), call .contiguous() "
        "once and not in each step",
        lambda report: report.ms_of("layout"),
    ),
)


def find(report: Report) -> list[Finding]:
    """The changes that help by the `RULES`."""
    findings = []
    for rule in RULES:
        gain = report.gain_of(rule.saved(report))
        if gain >= MIN_GAIN:
            found = f"{rule.estimate} {gain:.2f}x"
            findings.append(Finding(rule.change, rule.suggestion, found=found, gain=gain))
    return findings


# --- the backends of attention --------------------------------------------------------------------

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_ATTENTION = re.compile(
    r"aten::_scaled_dot_product_(?:attention_)?(flash|cudnn|efficient|math)(_attention(_for_cpu)?)?"
)


def compare_attention(report: Report, profile: Profile) -> list[Finding]:
    """Say which backend computes the attention that a step has most of, and advise another if each
    of its calls, forward and backward, took less time than each of the present one's."""
    calls: dict[str, list[Event]] = defaultdict(list)
    for event in (event for event in profile.host if _ATTENTION.fullmatch(event.name)):
        calls[repr((event.name, event.dims, event.types, event.values))].append(event)
    if not calls:
        return []
    same = max(calls.values(), key=len)
    event = same[0]
    times = measure_attention(event, report.device)
    used = _ATTENTION.sub(r"\1", event.name)
    medians = {name: statistics.median(ms) for name, ms in times.items()}
    taken = ", ".join(f"{figures(ms, 3)} ms by {name}" for name, ms in medians.items())
    report.attention = (
        f"Attention of {'x'.join(map(str, event.dims[0]))}, {event.precision}: {used} computes it. "
        + (f"Forward and backward take {taken}." if taken else "No backend could be measured.")
    )
    best = min(medians, key=lambda name: medians[name], default=used)
    if used not in times or max(times[best]) >= min(times[used]):
        return []
    gain = report.gain_of(len(same) / profile.steps * (medians[used] - medians[best]))
    if gain < MIN_GAIN:
        return []
    chosen = ", ".join(str(_BACKENDS[name]) for name in (best, used))
    line = f"with torch.nn.attention.sdpa_kernel([{chosen}], set_priority=True):"
    found = f"measured {gain:.2f}x"
    return [Finding(f"attention by {best}", f"around the steps: {line}", found=found, gain=gain)]


def measure_attention(event: Event, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of five calls like `event`, forward and backward, by each backend there is."""
    schema = getattr(torch.ops.aten, event.name.removeprefix("aten::")).default._schema
    named = zip((argument.name for argument in schema.arguments), event.values, strict=False)
    known = ("dropout_p", "is_causal", "scale")
    options = {name: ast.literal_eval(text) for name, text in named if name in known and text}
    # "float" and "c10::Half" are torch.float and torch.half.
    types = (getattr(torch, name.removeprefix("c10::").lower(), None) for name in event.types)
    query, key, value, *mask = (
        torch.empty_strided(sizes, strides, dtype=kind, device=device).fill_(1)
        for sizes, strides, kind in zip(event.dims, event.strides, types, strict=False)
        if sizes
    )
    inputs: list[Any] = [tensor.requires_grad_() for tensor in (query, key, value)]
    options["enable_gqa"] = query.shape[1] != key.shape[1]
    times = {}
    with same_random_numbers(), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of backends that are not for these tensors
        for name, backend in _BACKENDS.items():
            clock = StepClock(device)
            with contextlib.suppress(RuntimeError), sdpa_kernel(backend):
                for _ in range(3 + 5):
                    output = scaled_dot_product_attention(*inputs, *mask, **options)
                    torch.autograd.grad(output, inputs, torch.ones_like(output))
                    clock.mark()
                times[name] = clock.flush()[-5:]
    return times
