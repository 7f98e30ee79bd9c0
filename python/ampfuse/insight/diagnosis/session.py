"""From a watched training to a report."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

import ampfuse
from ampfuse import hardware
from ampfuse.devices import device_name
from ampfuse.insight.diagnosis import replay
from ampfuse.insight.diagnosis.advice import Case, all_advice, half_limit, misaligned
from ampfuse.insight.diagnosis.kinds import HALVES, LABELS, precision
from ampfuse.insight.diagnosis.marks import STEP, WAIT
from ampfuse.insight.diagnosis.report import OperationRow, Report, Share, WaitRow
from ampfuse.insight.diagnosis.timeline import Timeline, detail, lay_out
from ampfuse.insight.diagnosis.trace import Trace, read
from ampfuse.insight.diagnosis.watch import Finished, Watch

WARMUP, STEPS = 5, 10  # the defaults
_CROWDED = 0.1  # an idle machine has it near 0.01

_SENTENCES = {
    "data": "data-bound: the step waits for its batch",
    "python": "held up by the script's own Python between operations",
    "host": "launch-bound: many small operations, each cheaper than its launch",
    "sync": "held up by waiting for the device",
    "matrix": "bound by matrix work",
    "norm": "bound by normalisation, which is memory traffic",
    "reduction": "bound by reductions (softmax, losses), which are memory traffic",
    "memory": "bound by element-wise work and copies, which are memory traffic",
    "cast": "cast-bound: tensors go from one type to another",
    "layout": "bound by changes of layout (transpositions)",
    "optimizer": "optimizer-bound",
    "scaling": "bound by loss scaling",
    "communication": "bound by communication",
}


@contextlib.contextmanager
def doctor(
    *, warmup: int = WARMUP, steps: int = STEPS, stop: bool = False, script: str | None = None
) -> Iterator[Report]:
    """Say where the time of the training in this context goes::

        with ampfuse.insight.doctor() as report:
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
    examine(watch, report)


def examine(watch: Watch, report: Report) -> None:
    """Fill `report` with what `watch` saw; with its problem, if that was not enough."""
    report.problem = watch.problem or _too_short(watch)
    if report.problem:
        return
    assert watch.profiler is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        watch.profiler.export_chrome_trace(str(path))
        trace = read(path)
    steps = len(watch.seconds)
    stepping = sum(sum(stepper.seconds) for stepper in watch.steppers.values())
    waiting = watch.loading.wait_s if watch.loading else 0.0
    clocks = {"optimizer": 1e3 * stepping / steps, "data": 1e3 * waiting / steps}
    timeline = lay_out(trace, watch.step_ms, clocks)
    if timeline is None:
        report.problem = f"the training ended in its first profiled step, {watch.seen} steps in all"
        return
    devices = {device for stepper in watch.steppers.values() for *_, device in stepper.tensors}
    device = next((d for d in devices if d.type == "cuda"), torch.device("cpu"))
    _describe(report, watch, timeline, device)
    rows = _operations(timeline)
    report.waits = _waits(trace, timeline)
    case = Case(
        device,
        report.step_ms,
        {kind: sum(s.ms for s in report.shares if s.kind == kind) for kind in LABELS},
        [op for _, op in rows if op is not None],
        list(watch.steppers.values()),
        steps,
        watch.loading,
        timeline.host_us / len(timeline.steps) / 1e3,
    )
    report.operations = [row for row, _ in rows[:20]]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        report.advice = all_advice(case)
    report.half_limit, report.bound = half_limit(case)
    _judge(report, case)
    report.notes = _notes(case, rows)


def _too_short(watch: Watch) -> str | None:
    if watch.seen == 0:
        return "no torch.optim.Optimizer made a step in this process"
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
    order = list(LABELS)
    for (kind, more), ms in sorted(
        totals.items(), key=lambda item: (order.index(item[0][0]), -item[1])
    ):
        label = f"{LABELS[kind]}, {more}" if more else LABELS[kind]
        report.shares.append(Share(kind, label, ms, ms / report.step_ms, more))
    report.strip = _strip(timeline)


def _strip(timeline: Timeline, cells: int = 400) -> list[tuple[float, float, str]]:
    """The step of median length; each cell is what runs in its middle, neighbours are joined."""
    by_length = sorted(timeline.steps, key=lambda step: step[1] - step[0])
    begin, end = by_length[len(by_length) // 2]
    width = (end - begin) / cells
    ends = [piece.end for piece in timeline.pieces]
    middles = (begin + (cell + 0.5) * width for cell in range(cells))
    kinds = [timeline.pieces[bisect_right(ends, middle)].kind for middle in middles]
    strip, at = [], 0.0
    for kind, same in itertools.groupby(kinds):
        strip.append((at, at := at + len(list(same)) * width / 1e3, kind))
    return strip


def _operations(timeline: Timeline) -> list[tuple[OperationRow, replay.Operation | None]]:
    """The operations of a step, longest first, with what replays them."""
    found: dict[tuple[object, ...], tuple[OperationRow, replay.Operation | None, set[int]]] = {}
    times: dict[tuple[object, ...], float] = defaultdict(float)
    for piece in timeline.pieces:
        event = piece.event
        if event is None or piece.kind in ("host", "data", "python"):
            continue
        source = event.parent if event.category == "kernel" and event.parent else event
        source = replay.callable_one(source)
        key: tuple[object, ...] = (*replay.key(source), piece.kind)
        if key not in found:
            shapes = ", ".join("x".join(map(str, dims)) for dims in source.dims if _is_shape(dims))
            name = "Optimizer.step" if source.name == STEP else source.name
            row = OperationRow(name, piece.kind, detail(piece), shapes, 0.0, 0.0)
            inside = piece.kind in ("optimizer", "communication", "sync")
            found[key] = (row, None if inside else replay.operation(source, piece.kind), set())
        times[key] += timeline.us(piece) / 1e3
        found[key][2].add(id(source))
    rows = []
    for key, (row, op, calls) in found.items():
        count = len(calls) / len(timeline.steps)
        if op is not None:
            op.calls, op.ms = count, times[key]
        rows.append((dataclasses.replace(row, calls=count, ms=times[key]), op))
    rows.sort(key=lambda pair: -pair[0].ms)
    return rows


def _is_shape(dims: object) -> bool:
    return isinstance(dims, list) and bool(dims) and all(isinstance(size, int) for size in dims)


def _waits(trace: Trace, timeline: Timeline) -> list[WaitRow]:
    """Lines of the script that wait; not those in the optimizer and the loading, of CPU tensors."""
    counts: dict[str, list[float]] = defaultdict(list)
    begin, end = timeline.steps[0][0], timeline.steps[-1][1]
    for event in trace.host:
        outer = event.parent
        while outer is not None and not outer.name.startswith(WAIT):
            outer = outer.parent  # of calls in each other the outermost counts
        elsewhere = outer or event.kind in ("optimizer", "data")
        if event.name.startswith(WAIT) and not elsewhere and begin <= event.start < end:
            counts[event.name.removeprefix(WAIT)].append(event.duration / 1e3)
    steps = len(timeline.steps)
    return [
        WaitRow(*name.partition(" ")[::2], len(times) / steps, sum(times) / steps)
        for name, times in sorted(counts.items(), key=lambda item: -sum(item[1]))
        if len(times) >= steps / 2
    ]


def _judge(report: Report, case: Case) -> None:
    by_kind = {kind: report.share_of(kind) for kind in LABELS}
    report.verdict = max(by_kind, key=lambda kind: by_kind[kind])
    report.sentence = f"{_SENTENCES[report.verdict]} ({by_kind[report.verdict]:.0%} of the time)"
    if not report.advice:
        report.sentence += ". Nothing known here pays: a faster machine would"
    if report.queued > _CROWDED:
        cores, threads = hardware.core_count(), torch.get_num_threads()
        workers = case.loading.workers if case.loading else 0
        own = f" (or its own: {threads} threads and {workers} workers on {cores} cores)"
        report.sentence += f". Unsure, as other work is running{own * (threads + workers > cores)}"
        report.sentence += f": a thread was ready and had no core {report.queued:.0%} of the time"


def _notes(case: Case, rows: list[tuple[OperationRow, replay.Operation | None]]) -> list[str]:
    """Sizes that miss alignment, and convolutions of half images with channels first."""
    notes = []
    for row, op in rows:
        if op is None or row.kind != "matrix" or row.ms < 0.01 * case.step_ms:
            continue
        if (sizes := misaligned(op, case.device)) and row.name.endswith("mm"):
            notes.append(f"{row.name} {row.shapes}: {sizes} miss alignment ({row.ms:.2f} ms)")
        first = op.inputs[0]
        channels_first = first.is_image and first.strides[1] != 1 != first.dims[1]
        if channels_first and "conv" in row.name and precision(op.event) in HALVES:
            notes.append(f"{row.name} {row.shapes}: half precision with channels first (NCHW)")
    return notes[:6]
