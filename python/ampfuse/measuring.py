"""Clock and memory meters of the demo, the experiments and the doctor.

Only the functions that say so wait for a GPU: times are differences of events on the GPU."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import itertools
import math
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType


def wait_for(device: torch.device) -> None:
    """Make the host wait for all the work queued on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepClock:
    """Milliseconds of each training step, from the end of the previous step to its own end.

    So a step includes the wait for its data. The time between :meth:`flush` and :meth:`resume`
    (evaluation, checkpoints) does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[Any] = []  # CUDA events, or seconds

    def resume(self) -> None:
        """The next step begins now. Waits for the device."""
        wait_for(self.device)
        self._marks = []
        self.mark()

    def mark(self) -> None:
        """A step has ended; on a GPU, when its current stream gets here."""
        if self.device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self._marks.append(event)

    def flush(self) -> list[float]:
        """The steps since the last flush, in milliseconds. Waits for the device."""
        wait_for(self.device)
        marks, self._marks = self._marks, self._marks[-1:]
        if self.device.type == "cuda":
            return [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)]
        return [(end - begin) * 1e3 for begin, end in itertools.pairwise(marks)]


class ProcessMemory:
    """The peak memory since :meth:`start`, in bytes.

    On a GPU, ``torch.cuda.max_memory_allocated``; on the CPU, the peak resident memory of the
    process (with Python, libraries and the data set). Only Linux can reset the latter.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = "max_memory_allocated" if device.type == "cuda" else "process RSS"

    def release(self) -> None:
        """Return memory that earlier runs freed to the system: it is not part of this run."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            return
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

    def start(self) -> None:
        """Measure from here on."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak, VmHWM

    def peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        with contextlib.suppress(OSError, StopIteration):
            with open("/proc/self/status") as status:
                line = next(line for line in status if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclasses.dataclass
class TensorPeak:
    """The peak of a block of :func:`tensor_memory`, in MiB; NaN until the block ends."""

    mib: float = math.nan


@contextlib.contextmanager
def tensor_memory(device: torch.device) -> Iterator[TensorPeak]:
    """Context that measures the peak memory of the tensors of its body.

    The GPU's allocator keeps that number at no cost. On the CPU torch's profiler records every
    allocation, which takes time: measure time elsewhere.
    """
    peak = TensorPeak()
    if device.type == "cuda":
        memory = ProcessMemory(device)
        memory.start()
        yield peak
        peak.mib = memory.peak() / 2**20
        return
    cpu = torch.profiler.ProfilerActivity.CPU
    with silent_stderr(), torch.profiler.profile(activities=[cpu], profile_memory=True) as profiler:
        yield peak
    peak.mib = peak_bytes(profiler) / 2**20


def peak_bytes(profiler: torch.profiler.profile) -> int:
    """The most bytes at one time of what was allocated while `profiler` ran.

    torch also reports the release of an older block if an earlier profiler saw a block at that
    address. Such a release does not count.
    """
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events = results.experimental_event_tree()
    # One by one: compiled code allocates and frees within a single event of the profiler.
    blocks = [event for event in _with_children(events) if event.tag == _EventType.Allocation]
    allocated = peak = 0
    addresses = set()
    for event in sorted(blocks, key=lambda event: event.start_time_ns):
        block = event.extra_fields
        if block.alloc_size > 0:
            addresses.add(block.ptr)
        elif block.ptr in addresses:
            addresses.remove(block.ptr)
        else:
            continue
        allocated += block.alloc_size
        peak = max(peak, allocated)
    return peak


def _with_children(events: list[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _with_children(event.children)


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Discard output to file descriptor 2: the profiler logs its start, and a missing GPU."""
    saved = os.dup(2)
    try:
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
