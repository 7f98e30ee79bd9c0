"""Each microsecond of the profiled steps, given to one kind of work.

While a GPU works, time is what the GPU does. While it idles, and on the CPU always, time is what
the thread of the training does: the innermost operation, or Python between operations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from ampfuse.insight.diagnosis.kinds import (
    ENCLOSING,
    kind_by_name,
    kind_on_device,
    kind_on_host,
    precision,
    units,
)
from ampfuse.insight.diagnosis.marks import BEGIN, STEP
from ampfuse.insight.diagnosis.trace import Event, Trace

# Python between two operations takes tens of microseconds per call of a module. A longer pause is
# the script's own work: numpy, files, a generator that makes the next batch.
_PAUSE_US = 200.0
# The profiler needs 1 to 5 us for each operation that it writes down; a larger difference to the
# time without it has other causes, and is spread over all.
_MOST_PER_EVENT_US = 6.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Time from `start` to `end`, in microseconds, of one kind; `event` did it, if one did."""

    start: float
    end: float
    kind: str
    event: Event | None

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass
class Timeline:
    """The profiled steps.

    Attributes:
        steps: begin and end of each.
        pieces: all that is between the first begin and the last end, without gaps.
        scale: what a microsecond of each kind took without the profiler.
        host_us: how long the host works in a step; a GPU cannot make it shorter.
    """

    steps: list[tuple[float, float]]
    pieces: list[Piece]
    scale: dict[str, float]
    host_us: float

    def us(self, piece: Piece) -> float:
        """Microseconds of `piece`, on average of a step without the profiler."""
        return piece.duration * self.scale[piece.kind] / len(self.steps)


def lay_out(trace: Trace, step_ms: float, measured: Mapping[str, float] = {}) -> Timeline | None:
    """The timeline of `trace`; its steps took `step_ms` without the profiler.

    `measured` is what a clock said of kinds, in ms. Profiled steps may have other times: waits for
    a DataLoader come in bursts; and the profiler's own memory changes how often the temporaries of
    an optimizer are fresh pages, which can double its time.

    None if no whole step was profiled.
    """
    marks = [event for event in trace.host if event.name in (BEGIN, STEP)]
    if len(marks) < 2:
        return None
    thread = marks[0].thread
    marks = [mark for mark in marks if mark.thread == thread]
    steps = [(a.end, b.end) for a, b in pairwise(marks)]
    steps = steps[1:] or steps  # the first one pays for the profiler's start
    begin, end = _span(steps)
    for event in trace.host:
        event.kind = kind_on_host(event)
    for event in trace.device:
        event.kind = kind_on_device(event)
    own = [event for event in trace.host if event.thread == thread]
    others = [event for event in trace.host if event.thread != thread]
    work = sorted([*trace.forward, *(event.start for event in own if _is_work(event))])
    pieces = list(_fill(_innermost(own, begin, end), others, steps, work))
    host_us = sum(piece.duration for piece in pieces if piece.kind != "sync")
    if trace.device:
        # Communication shows where nothing else runs.
        talks = [event.kind == "communication" for event in trace.device]
        for layer in (True, False):
            events = [e for e, talk in zip(trace.device, talks, strict=True) if talk is layer]
            pieces = list(_overlay(events, pieces, begin, end))
    us = {kind: ms * 1e3 * len(steps) for kind, ms in measured.items()}
    if trace.device:
        us.pop("optimizer", None)  # a GPU works on when the clock has stopped
    if us.get("data") and not any(piece.kind == "data" for piece in pieces):
        pieces.append(Piece(end, end + 1.0, "data", None))  # to be scaled
    recorded = [event for event in trace.host if begin <= event.start < end]
    scale = _without_profiler(pieces, recorded, step_ms * 1e3 * len(steps), us)
    host_us *= step_ms * 1e3 / (end - begin)
    return Timeline(steps, pieces, scale, host_us)


def detail(piece: Piece) -> str:
    """Of matrix work its precision and what computes it: "BF16, tensor cores"; else ""."""
    if piece.kind != "matrix" or piece.event is None:
        return ""
    return f"{precision(piece.event) or 'integers'}, {units(piece.event)}"


def _innermost(events: list[Event], begin: float, end: float) -> list[Piece]:
    """The time between `begin` and `end`, each part with the innermost of `events` (one thread)."""
    pieces: list[Piece] = []
    stack: list[Event] = []
    at = begin

    def advance(until: float) -> None:
        nonlocal at
        until = min(until, end)
        if until > at:
            event = stack[-1] if stack else None
            pieces.append(Piece(at, until, event.kind if event else "host", event))
            at = until

    for event in events:
        while stack and stack[-1].end <= event.start:
            advance(stack[-1].end)
            stack.pop()
        advance(event.start)
        stack.append(event)
    while stack:
        advance(stack[-1].end)
        stack.pop()
    advance(end)
    return pieces


def _fill(
    pieces: list[Piece], others: list[Event], steps: list[tuple[float, float]], work: list[float]
) -> Iterator[Piece]:
    """`pieces`, where this thread does nothing in torch: what `others` do, or Python.

    Autograd runs the backward pass of a GPU on a thread of its own, gloo communicates on another. A
    pause between a step and the next begin of `work` is the script's own loading; if it has a
    DataLoader, a pause after that.
    """
    threads: dict[object, list[Event]] = defaultdict(list)
    for event in others:
        threads[event.thread].append(event)
    tracks = [_Track(_innermost(events, *_span(steps))) for events in threads.values()]
    loads = [piece.start for piece in pieces if piece.kind == "data"]
    for piece in pieces:
        transparent = piece.event is None or (
            # An annotation of the script: its time is that of the Python in it.
            piece.event.category == "user_annotation" and piece.kind == "host"
        )
        if not transparent:
            yield piece
            continue
        covering = (
            part
            for track in tracks
            for part in track.between(piece.start, piece.end)
            if part.event is not None
        )
        at = piece.start
        for part in sorted(covering, key=lambda part: part.start):
            if part.end <= at:
                continue
            if part.start > at:
                yield Piece(at, part.start, "host", None)
            yield Piece(max(at, part.start), part.end, part.kind, part.event)
            at = part.end
        if at >= piece.end:
            continue
        kind = piece.kind
        if kind == "host" and piece.end - at > _PAUSE_US:
            step = next((step for step in steps if step[0] <= at < step[1]), steps[-1])
            load = next((start for start in loads if step[0] <= start < step[1]), at)
            first = next((start for start in work if step[0] <= start < step[1]), step[1])
            kind = "data" if load <= at < first else "python"
        yield Piece(at, piece.end, kind, piece.event)


def _is_work(event: Event) -> bool:
    """Of a backward pass, or of a model though it may be one that is not trained."""
    return event.name.startswith("autograd::engine") or kind_by_name(event) in ("matrix", "norm")


def _overlay(device: list[Event], host: list[Piece], begin: float, end: float) -> Iterator[Piece]:
    """The kernels of `device` (when several run, the first); where none runs, those of `host`."""
    track, at = _Track(host), begin
    for event in [*device, Event("end", "kernel", end, end)]:
        start = min(event.start, end)
        if start > at:
            idle = list(track.between(at, start))
            # Idle because the host had waited for the device and now begins anew.
            after_wait = idle[0].kind == "sync"
            for piece in idle:
                kind = "sync" if after_wait else piece.kind
                kind = kind if kind in ("data", "python", "sync", "communication") else "host"
                yield Piece(piece.start, piece.end, kind, piece.event)
            at = start
        stop = min(event.end, end)
        if stop > at:
            yield Piece(at, stop, event.kind, event)
            at = stop


class _Track:
    """Pieces one after the other, to be looked up by time."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self._ends = [piece.end for piece in pieces]

    def between(self, begin: float, end: float) -> Iterator[Piece]:
        """The pieces from `begin` to `end`, cut there."""
        for place in range(bisect_right(self._ends, begin), len(self.pieces)):
            piece = self.pieces[place]
            if piece.start >= end:
                return
            yield Piece(max(piece.start, begin), min(piece.end, end), piece.kind, piece.event)


def _span(steps: list[tuple[float, float]]) -> tuple[float, float]:
    return steps[0][0], steps[-1][1]


def _without_profiler(
    pieces: Iterable[Piece], recorded: list[Event], wanted_us: float, measured: Mapping[str, float]
) -> dict[str, float]:
    """For each kind: its time without the profiler over its time with it.

    Writing down an operation costs the same for each, and falls into what is around it. What the
    measured difference leaves after that is spread over all kinds but those that are `measured`;
    the waits for data are at least that.
    """
    total: dict[str, float] = defaultdict(float)
    for piece in pieces:
        total[piece.kind] += piece.duration
    known = {kind: measured[kind] for kind in measured.keys() & total.keys() & {"optimizer"}}
    wanted_us -= sum(known.values())
    counts: dict[str, int] = defaultdict(int)
    for event in recorded:
        outer = event.parent.kind if event.parent else "host"
        counts[outer if outer in ENCLOSING else "host"] += 1
    left = {kind: us for kind, us in total.items() if kind not in known}
    excess = max(0.0, sum(left.values()) - wanted_us)
    each = min(_MOST_PER_EVENT_US, excess / max(1, sum(counts[kind] for kind in left)))
    left = {kind: max(0.1 * us, us - each * counts[kind]) for kind, us in left.items()}
    rest = wanted_us / max(sum(left.values()), 1e-9)
    waited = min(measured.get("data", 0.0), wanted_us)
    if waited > rest * left.get("data", 0.0):  # longer than the profile shows
        known["data"] = waited
        left.pop("data")
        rest = (wanted_us - waited) / max(sum(left.values()), 1e-9)
    known |= {kind: rest * us for kind, us in left.items()}
    return {kind: us / total[kind] for kind, us in known.items()}
