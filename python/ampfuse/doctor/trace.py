"""A profile as torch exports it for Chrome's viewer, read into events that know their parents.

This format is the one that torch documents and keeps: shapes, strides and types of the inputs,
and on a GPU the kernels with the operations that launched them. Times are in microseconds.
The doctor's own annotations are in it, too: the end of each optimizer step, and its closure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEP = "ampfuse.doctor step"  # at the end of what torch calls "Optimizer.step#..."
CLOSURE = "ampfuse.doctor closure"  # the forward and backward pass that a step was given

# Categories of what runs on the host, and on the GPU.
_HOST = frozenset({"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"})
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


@dataclass(slots=True, eq=False)
class Event:
    """One operation, annotation, call of the CUDA runtime, or kernel.

    Attributes:
        thread: of the host; of a kernel its stream.
        dims, strides, types: one entry for each input, as torch prints them.
        parent: the event around it on its thread; of a kernel the operation that launched it.
        self_us: its time without that of the events inside.
        kind: see ``kinds``; set by ``timeline``.
    """

    name: str
    category: str
    start: float
    end: float
    thread: object = 0
    dims: list[Any] = field(default_factory=list)
    strides: list[Any] = field(default_factory=list)
    types: list[str] = field(default_factory=list)
    parent: Event | None = None
    self_us: float = 0.0
    kind: str = ""

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass
class Trace:
    """Events of the host and of the device; begins of operations that a backward pass is due to."""

    host: list[Event]
    device: list[Event]
    forward: list[float] = field(default_factory=list)


def read(path: Path) -> Trace:
    """The trace that ``torch.profiler.profile.export_chrome_trace`` wrote to `path`."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return build(json.load(file)["traceEvents"])


def build(records: Iterable[Mapping[str, Any]]) -> Trace:
    """The events among `records`, the ``traceEvents`` of a trace."""
    trace, by_id, launchers = Trace([], []), {}, {}
    for record in records:
        category, facts = record.get("cat", ""), record.get("args", {})
        if category == "fwdbwd" and record["ph"] == "s":
            trace.forward.append(float(record["ts"]))
        if record.get("ph", "X") != "X" or category not in _HOST | _DEVICE:
            continue
        start, on_device = float(record["ts"]), category in _DEVICE
        event = Event(
            record["name"],
            category,
            start,
            start + float(record.get("dur", 0)),
            facts.get("stream", 0) if on_device else record.get("tid", 0),
            facts.get("Input Dims", []),
            facts.get("Input Strides", []),
            facts.get("Input type", []),
        )
        (trace.device if on_device else trace.host).append(event)
        if on_device:
            launchers[event] = facts.get("External id")
        elif category == "cpu_op":
            by_id[facts.get("External id")] = event
    for event, launcher in launchers.items():
        event.parent = by_id.get(launcher)
    trace.host.sort(key=lambda event: (event.start, -event.end))
    trace.device.sort(key=lambda event: event.start)
    _nest(trace.host)
    return trace


def _nest(events: list[Event]) -> None:
    """Set parent and self time, thread by thread; `events` are sorted."""
    open_on: dict[object, list[Event]] = {}
    for event in events:
        event.self_us = event.duration
        stack = open_on.setdefault(event.thread, [])
        while stack and stack[-1].end <= event.start:
            stack.pop()
        if stack:
            event.parent = stack[-1]
            event.parent.self_us -= min(event.end, event.parent.end) - event.start
        stack.append(event)
