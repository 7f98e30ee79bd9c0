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
from ampfuse.devices import device_name
from ampfuse.doctor import rules
from ampfuse.doctor.kinds import LABELS
from ampfuse.doctor.report import Operation, Report, Share
from ampfuse.doctor.timeline import Timeline, detail, lay_out
from ampfuse.doctor.trace import STEP, read
from ampfuse.doctor.watch import Finished, Watch

WARMUP, STEPS = 5, 10  # the defaults


@contextlib.contextmanager
def examine(
    *, warmup: int = WARMUP, steps: int = STEPS, stop: bool = False, script: str | None = None
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
    operations = _operations(timeline, report.step_ms)
    report.operations = operations[:20]
    ms = {kind: report.share_of(kind) * report.step_ms for kind in LABELS}
    case = rules.Case(watch.device, report.step_ms, ms, operations, watch.optimizers, watch.workers)
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
        return (
            f"the training ended after {watch.seen} optimizer step{'s' * (watch.seen > 1)}; "
            f"{watch.needed} are needed ({watch.warmup} to warm up, {watch.steps} to time, the "
            "rest to profile): give smaller warmup and steps"
        )
    return None


def _describe(report: Report, watch: Watch, timeline: Timeline) -> None:
    times = [seconds * 1e3 for seconds in watch.seconds]
    report.hardware = device_name(watch.device)
    report.versions = f"torch {torch.__version__}, ampfuse {ampfuse.__version__}"
    report.steps, report.step_ms = len(times), watch.step_ms
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


def _operations(timeline: Timeline, step_ms: float) -> list[Operation]:
    """The operations of a step, longest first."""
    found: dict[tuple[str, str, str], Operation] = {}
    calls: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for piece in timeline.pieces:
        event, kind = piece.event, piece.kind
        if event is None or kind in ("host", "data", "python"):
            continue
        source = event.parent if event.category == "kernel" and event.parent else event
        key = source.name, repr((source.dims, source.strides, source.types)), kind
        if key not in found:
            name = source.name.replace(STEP, "Optimizer.step")
            found[key] = Operation(name, kind, source)
        found[key].ms += timeline.share(piece) * step_ms
        calls[key].add(id(source))
    for key, op in found.items():
        op.calls = len(calls[key]) / len(timeline.steps)
    return sorted(found.values(), key=lambda op: -op.ms)
