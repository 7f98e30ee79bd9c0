"""Each microsecond of the profiled steps, given to one kind of work.

While a GPU works, time is what the GPU does. While it idles, and on the CPU always, time is what
the thread of the training does: the innermost operation, or Python between operations.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ampfuse.doctor.kinds import kind_by_name, kind_on_device, kind_on_host, precision, units
from ampfuse.doctor.trace import STEP, Event, Trace

# Python between two operations takes tens of microseconds per call of a module. A longer pause is
# the script's own work: numpy, files, a generator that makes the next batch.
_PAUSE_US = 200.0
# Of a GPU's work what moves data shows where nothing else runs.
_TRANSFERS = frozenset({"communication", "data", "sync"})


@dataclass(slots=True)
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
class Operation:
    """Calls of one operation with equal inputs, in a step.

    Attributes:
        event: one of the calls.
    """

    name: str
    kind: str
    event: Event
    calls: float = 0.0
    ms: float = 0.0

    @property
    def shapes(self) -> str:
        """Those of the tensors that it was given: ``"100x509, 509x1021"``."""
        dims = (dims for dims in self.event.dims if dims and all(isinstance(n, int) for n in dims))
        return ", ".join("x".join(map(str, sizes)) for sizes in dims)


@dataclass
class Timeline:
    """The profiled steps.

    Attributes:
        steps: begin and end of each.
        pieces: all that is between the first begin and the last end, without gaps.
    """

    steps: list[tuple[float, float]]
    pieces: list[Piece]

    def share(self, piece: Piece) -> float:
        """The part of the profiled time, 0 to 1, that `piece` takes."""
        return piece.duration / (self.steps[-1][1] - self.steps[0][0])


def lay_out(trace: Trace) -> Timeline | None:
    """The timeline of `trace`; None if no whole step was profiled.

    A step is from the end of one optimizer step to the end of the next.
    """
    marks = [event for event in trace.host if event.name == STEP]
    if len(marks) < 2:
        return None
    steps = [(before.end, mark.end) for before, mark in pairwise(marks)]
    begin, end = steps[0][0], steps[-1][1]
    threads: dict[object, list[Event]] = {marks[0].thread: []}  # the first one has priority
    for event in trace.host:
        event.kind = kind_on_host(event)
        threads.setdefault(event.thread, []).append(event)
    # Autograd runs the backward pass of a GPU on a thread of its own, gloo communicates on another.
    pieces = _on_host(list(threads.values()), begin, end)
    starts = (event.start for event in threads[marks[0].thread] if _is_work(event))
    _find_pauses(pieces, steps, sorted([*trace.forward, *starts]))
    if trace.device:
        for event in trace.device:
            event.kind = kind_on_device(event)
        pieces = _on_device(trace.device, pieces, begin, end)
    return Timeline(steps, pieces)


def detail(piece: Piece) -> str:
    """Of matrix work its precision and what computes it: "BF16, tensor cores"; else ""."""
    if piece.kind != "matrix" or piece.event is None:
        return ""
    return f"{precision(piece.event) or 'integers'}, {units(piece.event)}"


def operations_of(timeline: Timeline, step_ms: float) -> list[Operation]:
    """The operations of a step, longest first."""
    found: dict[tuple[str, str, str], Operation] = {}
    calls: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for piece in timeline.pieces:
        event, kind = piece.event, piece.kind
        if event is None or event.name == STEP or kind in ("host", "data", "python"):
            continue
        source = event.parent if event.category == "kernel" and event.parent else event
        key = source.name, repr((source.dims, source.strides, source.types)), kind
        if key not in found:
            found[key] = Operation(source.name, kind, source)
        found[key].ms += timeline.share(piece) * step_ms
        calls[key].add(id(source))
    for key, op in found.items():
        op.calls = len(calls[key]) / len(timeline.steps)
    return sorted(found.values(), key=lambda op: -op.ms)


def _sweep(
    lanes: Sequence[Sequence[Any]], begin: float, end: float
) -> Iterator[tuple[float, float, list[Any]]]:
    """Times in which nothing begins or ends, each with the innermost one of each lane, or None.

    A lane is sorted by start. Of two that overlap, as on a GPU, the later one counts.
    """
    times = {time for lane in lanes for each in lane for time in (each.start, each.end)}
    cuts = sorted({begin, end, *(time for time in times if begin < time < end)})
    coming = [deque(lane) for lane in lanes]
    running: list[list[Any]] = [[] for _ in lanes]
    for start, stop in pairwise(cuts):
        for queue, stack in zip(coming, running, strict=True):
            while queue and queue[0].start <= start:
                stack.append(queue.popleft())
            while stack and stack[-1].end <= start:
                stack.pop()
        yield start, stop, [stack[-1] if stack else None for stack in running]


def _extend(pieces: list[Piece], start: float, stop: float, kind: str, event: Event | None) -> None:
    """Append a piece, or make the last one longer if it is of the same."""
    if pieces and pieces[-1].event is event and pieces[-1].kind == kind:
        pieces[-1].end = stop
    else:
        pieces.append(Piece(start, stop, kind, event))


def _on_host(threads: list[list[Event]], begin: float, end: float) -> list[Piece]:
    """What the first thread does; where it does nothing of torch's, the next ones."""
    pieces: list[Piece] = []
    for start, stop, innermost in _sweep(threads, begin, end):
        event = next((event for event in innermost if event and not _is_of_script(event)), None)
        _extend(pieces, start, stop, event.kind if event else "host", event)
    return pieces


def _is_of_script(event: Event) -> bool:
    """In an annotation of the script, time is that of its Python."""
    return event.category == "user_annotation" and event.kind == "host"


def _on_device(events: list[Event], host: list[Piece], begin: float, end: float) -> list[Piece]:
    """What the device does, and where it idles, what it waits for on the `host`."""
    work = [event for event in events if event.kind not in _TRANSFERS]
    transfers = [event for event in events if event.kind in _TRANSFERS]
    pieces: list[Piece] = []
    idles = after_wait = False
    for start, stop, (working, moving, on_host) in _sweep((work, transfers, host), begin, end):
        event = working or moving
        if event is None and not idles:
            # Idle because the host had waited for the device and now begins anew.
            after_wait = on_host.kind == "sync"
        idles = event is None
        if event is None:
            kind = on_host.kind if on_host.kind in _TRANSFERS | {"python"} else "host"
            _extend(pieces, start, stop, "sync" if after_wait else kind, on_host.event)
        else:
            _extend(pieces, start, stop, event.kind, event)
    return pieces


def _find_pauses(pieces: list[Piece], steps: list[tuple[float, float]], work: list[float]) -> None:
    """Tell the script's own long pauses apart: its loading, or other Python.

    A pause between a step and the next begin of `work` is loading; if the script has a DataLoader,
    only a pause after that.
    """
    loads = [piece.start for piece in pieces if piece.kind == "data"]
    for piece in pieces:
        if piece.event is None and piece.duration > _PAUSE_US:
            at = piece.start
            step = next((step for step in steps if step[0] <= at < step[1]), steps[-1])
            load = next((start for start in loads if step[0] <= start < step[1]), at)
            first = next((start for start in work if step[0] <= start < step[1]), step[1])
            piece.kind = "data" if load <= at < first else "python"


def _is_work(event: Event) -> bool:
    """Of a backward pass, or of a model though it may be one that is not trained."""
    return event.name.startswith("autograd::engine") or kind_by_name(event) in ("matrix", "norm")
