"""From a watched training to a report."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

import ampfuse
from ampfuse import hardware
from ampfuse.devices import device_name
from ampfuse.doctor import replay, rules
from ampfuse.doctor.annotations import STEP, WAIT
from ampfuse.doctor.kinds import LABELS, VERDICTS
from ampfuse.doctor.replay import Operation
from ampfuse.doctor.report import Report, Share
from ampfuse.doctor.rules import Case
from ampfuse.doctor.timeline import Timeline, detail, lay_out
from ampfuse.doctor.trace import Trace, read
from ampfuse.doctor.watch import Finished, Watch
from ampfuse.insight.findings import Finding

WARMUP, STEPS = 5, 10  # the defaults
_CROWDED = 0.1  # an idle machine has it near 0.01


@contextlib.contextmanager
def examine(
    *, warmup: int = WARMUP, steps: int = STEPS, stop: bool = False, script: str | None = None
) -> Iterator[Report]:
    """Say where the time of the training in this context goes::

        with ampfuse.doctor.examine() as report:
            for inputs, targets in loader:
                ...
        print(report)
        report.save_html("doctor.html")

    After `warmup` optimizer steps, `steps` are timed and as many profiled. The report is complete
    at the end of the context, after up to a minute in which operations of the training are timed
    again; the training itself, its random numbers and its results stay as they are.

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
    steps, steppers = len(watch.seconds), list(watch.steppers.values())
    stepping = sum(sum(stepper.seconds) for stepper in steppers)
    waiting = watch.loading.wait_s if watch.loading else 0.0
    clocks = {"optimizer": 1e3 * stepping / steps, "data": 1e3 * waiting / steps}
    timeline = lay_out(trace, watch.step_ms, clocks)
    if timeline is None:
        report.problem = f"the training ended in its first profiled step, {watch.seen} steps in all"
        return
    devices = {device for stepper in steppers for *_, device in stepper.tensors}
    device = next((d for d in devices if d.type == "cuda"), torch.device("cpu"))
    _describe(report, watch, timeline, device)
    operations = _operations(timeline)
    report.operations = operations[:20]
    case = Case(
        device=device,
        step_ms=report.step_ms,
        ms={kind: report.share_of(kind) * report.step_ms for kind in LABELS},
        operations=[op for op in operations if op.overload is not None],
        steppers=steppers,
        steps=steps,
        loading=watch.loading,
        host_ms=timeline.host_us / len(timeline.steps) / 1e3,
    )
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        report.findings = rules.find(case)
        report.half_limit, report.bound = rules.half_limit(case)
    report.findings += [*_waits(trace, timeline), *list(rules.shape_notes(case))[:6]]
    judge(report, case)


def _too_short(watch: Watch) -> str | None:
    if watch.seen == 0:
        return (
            "no torch.optim.Optimizer made a step in this process; if others train, use "
            "`with ampfuse.doctor.examine():` around their loop"
        )
    if watch.profiler is None:
        return (
            f"the training ended after {watch.seen} optimizer step{'s' * (watch.seen > 1)}; "
            f"{watch.needed} are needed ({watch.warmup} to warm up, {watch.steps} to time, the "
            "rest to profile): give smaller warmup and steps"
        )
    return None


def _describe(report: Report, watch: Watch, timeline: Timeline, device: torch.device) -> None:
    times = [seconds * 1e3 for seconds in watch.seconds]
    report.hardware = device_name(device)
    report.versions = f"torch {torch.__version__}, ampfuse {ampfuse.__version__}"
    report.steps, report.step_ms = len(times), watch.step_ms
    report.fastest_ms, report.slowest_ms = min(times), max(times)
    report.queued = watch.queued
    begin, end = timeline.steps[0][0], timeline.steps[-1][1]
    report.profiled_ms = (end - begin) / len(timeline.steps) / 1e3
    totals: dict[tuple[str, str], float] = defaultdict(float)
    for piece in timeline.pieces:
        totals[piece.kind, detail(piece)] += timeline.us(piece) / 1e3
    order = {kind: place for place, kind in enumerate(LABELS)}
    for (kind, more), ms in sorted(totals.items(), key=lambda item: (order[item[0][0]], -item[1])):
        label = f"{LABELS[kind]}, {more}" if more else LABELS[kind]
        report.shares.append(Share(kind, label, ms, ms / report.step_ms, more))


def _operations(timeline: Timeline) -> list[Operation]:
    """The operations of a step, longest first."""
    found: dict[tuple[object, ...], Operation] = {}
    calls: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for piece in timeline.pieces:
        event, kind = piece.event, piece.kind
        if event is None or kind in ("host", "data", "python"):
            continue
        source = event.parent if event.category == "kernel" and event.parent else event
        source = replay.callable_one(source)
        key: tuple[object, ...] = (*replay.key(source), kind)
        if key not in found:
            op = replay.operation(source, kind)
            if kind in ("optimizer", "communication", "sync"):  # a part of something
                op.overload = None
            op.name, op.detail = op.name.replace(STEP, "Optimizer.step"), detail(piece)
            found[key] = op
        found[key].ms += timeline.us(piece) / 1e3
        calls[key].add(id(source))
    for key, op in found.items():
        op.calls = len(calls[key]) / len(timeline.steps)
    return sorted(found.values(), key=lambda op: -op.ms)


def _waits(trace: Trace, timeline: Timeline) -> list[Finding]:
    """Lines of the script that wait; not those in the optimizer and the loading, of CPU tensors."""
    waits: dict[str, list[float]] = defaultdict(list)
    begin, end = timeline.steps[0][0], timeline.steps[-1][1]
    for event in trace.host:
        outer = event.parent
        while outer is not None and not outer.name.startswith(WAIT):
            outer = outer.parent  # of calls in each other the outermost counts
        elsewhere = outer or event.kind in ("optimizer", "data")
        if event.name.startswith(WAIT) and not elsewhere and begin <= event.start < end:
            waits[event.name.removeprefix(WAIT)].append(event.duration)
    steps = len(timeline.steps)
    found = []
    for name, times in sorted(waits.items(), key=lambda item: -sum(item[1])):
        call, _, line = name.partition(" ")
        if len(times) >= steps / 2:
            said = f"{call}: waits {len(times) / steps:g} times a step"
            found.append(Finding("wait", "read it every hundred steps", line, said))
    return found


def judge(report: Report, case: Case) -> None:
    """Set the verdict, and say whether it is to be trusted."""
    by_kind = {kind: report.share_of(kind) for kind in LABELS}
    report.verdict = max(by_kind, key=lambda kind: by_kind[kind])
    report.sentence = f"{VERDICTS[report.verdict]} ({by_kind[report.verdict]:.0%} of the time)"
    if not report.advice:
        report.sentence += ". Nothing known here pays: a faster machine would"
    if report.queued > _CROWDED:
        cores, threads = hardware.core_count(), torch.get_num_threads()
        workers = case.loading.workers if case.loading else 0
        own = f" (or its own: {threads} threads and {workers} workers on {cores} cores)"
        report.sentence += f". Unsure, as other work is running{own * (threads + workers > cores)}"
        report.sentence += f": a thread was ready and had no core {report.queued:.0%} of the time"
