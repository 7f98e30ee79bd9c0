"""What the doctor found: numbers for programs, a table for a terminal; and how they come about."""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

import ampfuse
from ampfuse.devices import device_name
from ampfuse.doctor import rules
from ampfuse.doctor.kinds import LABELS
from ampfuse.doctor.timeline import Operation, Timeline, detail, lay_out, operations_of
from ampfuse.doctor.trace import read
from ampfuse.doctor.watch import Finished, Watch
from ampfuse.insight.findings import Finding


@dataclass(frozen=True)
class Share:
    """Time of one kind of work in a step. `detail` tells kinds of matrix work apart."""

    kind: str
    label: str
    ms: float
    share: float
    detail: str = ""


@dataclass
class Report:
    """The doctor's findings. Times are of one step without the profiler, in milliseconds.

    Attributes:
        script: what was run.
        problem: why there are no findings, in one line; None if there are.
        hardware, versions: what the numbers hold for.
        steps: how many were timed, and profiled after that.
        step_ms: mean of the timed steps; `fastest_ms` and `slowest_ms` are their range.
        profiled_ms: mean of the profiled ones, which the profiler slows.
        shares: where the time goes, by kinds of work; they sum up to `step_ms`.
        operations: those that take most, first.
        verdict: the kind of work (``kinds.LABELS``) that takes most, and ...
        sentence: ... that in words.
        half_limit: no half precision can make the step more than so many times as fast; `bound`
            says why.
        advice: what would pay, in the order of gain.
    """

    script: str = ""
    problem: str | None = "nothing was measured yet"
    hardware: str = ""
    versions: str = ""
    steps: int = 0
    step_ms: float = 0.0
    fastest_ms: float = 0.0
    slowest_ms: float = 0.0
    profiled_ms: float = 0.0
    shares: list[Share] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    verdict: str = ""
    sentence: str = ""
    half_limit: float = 1.0
    bound: str = ""
    advice: list[Finding] = field(default_factory=list)

    def share_of(self, *kinds: str) -> float:
        """The share of the step, 0 to 1, of all work of `kinds`."""
        return sum(share.share for share in self.shares if share.kind in kinds)

    @property
    def conditions(self) -> str:
        """How long a step takes, how that was measured, and on what."""
        return (
            f"{self.step_ms:.1f} ms a step (mean of {self.steps}, {self.fastest_ms:.1f} to "
            f"{self.slowest_ms:.1f}); {self.profiled_ms:.1f} under the profiler, whose shares are "
            f"scaled to the former. {self.hardware}; {self.versions}"
        )

    def __str__(self) -> str:
        if self.problem:
            return f"ampfuse doctor: {self.problem}"
        lines = [f"{self.script}: {self.sentence}", "", self.conditions, ""]
        width = max(len(share.label) for share in self.shares)
        for share in self.shares:
            if share.share >= 0.0005:
                bar = "#" * round(30 * share.share)
                lines.append(
                    f"  {share.label:{width}} {share.share:6.1%} {share.ms:9.2f} ms  {bar}"
                )
        lines += ["", "Operations that take most:"]
        for op in self.operations[:5]:
            lines.append(f"  {op.ms:9.2f} ms  {op.calls:g} x {op.name} {op.shapes}".rstrip())
        lines += ["", self.bound]
        lines += ["", "What pays most:"] if self.advice else []
        for place, one in enumerate(self.advice[:5], 1):
            lines += [f"  {place}. {one.found}: {one.kind}", f"     {one.remedy}"]
        return "\n".join(lines)


@contextlib.contextmanager
def examine(
    *, warmup: int = 5, steps: int = 10, stop: bool = False, script: str | None = None
) -> Iterator[Report]:
    """Say where the time of the training in this context goes::

        with ampfuse.doctor.examine() as report:
            for inputs, targets in loader:
                ...
        print(report)

    After `warmup` optimizer steps, `steps` are timed and as many profiled. The report is complete
    at the end of the context; the training, its random numbers and its results stay as they are.

    Arguments:
        stop: leave the context after the last of these steps. Otherwise it goes on unwatched.
        script: the name in the report.

    Raises:
        ValueError: `warmup` or `steps` is less than 1. An error of the training passes through.
    """
    if min(warmup, steps) < 1:
        raise ValueError(f"warmup and steps must be at least 1, not {warmup} and {steps}")
    report = Report(script=script or Path(sys.argv[0]).name or "the training")
    watch = Watch(warmup, steps, stop)
    with watch, contextlib.suppress(Finished):
        yield report
    fill(report, watch)


def fill(report: Report, watch: Watch) -> None:
    """Complete `report` with what `watch` saw; with its problem, if that was not enough."""
    report.problem = watch.problem or _too_short(watch)
    if report.problem:
        return
    assert watch.profiler is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        watch.profiler.export_chrome_trace(str(path))
        trace = read(path)
    timeline = lay_out(trace)
    if timeline is None:
        report.problem = f"the training ended in its first profiled step, {watch.seen} steps in all"
        return
    _describe(report, watch, timeline)
    operations = operations_of(timeline, report.step_ms)
    report.operations = operations[:20]
    ms = {kind: report.share_of(kind) * report.step_ms for kind in LABELS}
    loaders = {e.name for e in trace.host if e.name.startswith("enumerate(DataLoader)")}
    workers = any("MultiProcessing" in name for name in loaders) if loaders else None
    case = rules.Case(watch.device, report.step_ms, ms, operations, watch.optimizers, workers)
    report.advice = rules.find(case)
    report.half_limit, report.bound = rules.half_limit(case)
    report.verdict = max(ms, key=lambda kind: ms[kind])
    share = report.share_of(report.verdict)
    report.sentence = f"{LABELS[report.verdict]} takes most ({share:.0%} of the time)"
    if not report.advice:
        report.sentence += ". Nothing known here pays: a faster machine would"


def _too_short(watch: Watch) -> str | None:
    if watch.seen == 0:
        return (
            "no torch.optim.Optimizer made a step in this process; if others train, use "
            "`with ampfuse.doctor.examine():` around their loop"
        )
    if watch.profiler is None:
        needed = watch.warmup + 2 * watch.steps + 1  # the first profiled one is left out
        return (
            f"the training ended after {watch.seen} optimizer step{'s' * (watch.seen > 1)}; "
            f"{needed} are needed ({watch.warmup} to warm up, {watch.steps} to time, the rest to "
            "profile): give smaller warmup and steps"
        )
    return None


def _describe(report: Report, watch: Watch, timeline: Timeline) -> None:
    times = [seconds * 1e3 for seconds in watch.seconds]
    report.hardware = device_name(watch.device)
    report.versions = f"torch {torch.__version__}, ampfuse {ampfuse.__version__}"
    report.steps, report.step_ms = len(times), statistics.fmean(times)
    report.fastest_ms, report.slowest_ms = min(times), max(times)
    begin, end = timeline.steps[0][0], timeline.steps[-1][1]
    report.profiled_ms = (end - begin) / len(timeline.steps) / 1e3
    totals: dict[tuple[str, str], float] = defaultdict(float)
    for piece in timeline.pieces:
        totals[piece.kind, detail(piece)] += timeline.share(piece)
    order = list(LABELS)
    by_kind = sorted(totals.items(), key=lambda item: (order.index(item[0][0]), -item[1]))
    for (kind, more), share in by_kind:
        label = f"{LABELS[kind]}, {more}" if more else LABELS[kind]
        report.shares.append(Share(kind, label, share * report.step_ms, share, more))
