"""What demo and experiments measure with: a clock, a log of steps, the peak of memory.

Nothing here makes the host wait for a GPU but where it says so: times are those of events on the
GPU, and what a step leaves is gathered there.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

Instant = float | torch.cuda.Event


def instant(device: torch.device) -> Instant:
    """Now; on a GPU when it comes to this point of its current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def milliseconds(begin: Instant, end: Instant) -> float:
    """Between two instants; the device must have come to both."""
    if isinstance(begin, torch.cuda.Event):
        return begin.elapsed_time(end)  # type: ignore[arg-type]
    return (end - begin) * 1e3  # type: ignore[operator]


def wait_for(device: torch.device) -> None:
    """Have the host wait for all that `device` was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepClock:
    """Milliseconds of each training step, from the end of the one before to its own end.

    So a step includes the wait for its data. Between :meth:`flush` and :meth:`resume` (evaluation,
    checkpoints) nothing counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[Instant] = []

    def resume(self) -> None:
        """Steps begin now. Waits for the device."""
        wait_for(self.device)
        self._marks = [instant(self.device)]

    def mark(self) -> None:
        """A step has ended."""
        self._marks.append(instant(self.device))

    def flush(self) -> list[float]:
        """The steps since the last flush, in milliseconds. Waits for the device."""
        wait_for(self.device)
        marks, self._marks = self._marks, self._marks[-1:]
        return [milliseconds(a, b) for a, b in itertools.pairwise(marks)]


class StepLog:
    """Loss, loss scale and skip of up to `size` steps, on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._values = torch.zeros(size, 3, device=device)
        self._used = 0

    def add(self, loss: Tensor, loss_scale: Tensor, skipped: Tensor) -> None:
        """All float32, 0-dim, on the device; `skipped` is 1 or 0."""
        torch.stack((loss, loss_scale, skipped), out=self._values[self._used])
        self._used += 1

    def flush(self) -> tuple[list[float], list[float], list[bool]]:
        """The steps so far, then forgotten. Waits for the device."""
        losses, scales, skipped = self._values[: self._used].T.tolist()
        self._used = 0
        return losses, scales, [bool(value) for value in skipped]


class ProcessMemory:
    """The peak of memory since :meth:`start`, in bytes.

    On a GPU ``torch.cuda.max_memory_allocated``; on the CPU the most that was resident of the
    process (Python, libraries and the data set included), where the kernel can forget an earlier
    peak, as Linux can, since the start of the run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = "max_memory_allocated" if device.type == "cuda" else "process RSS"

    def release(self) -> None:
        """Give back what earlier runs freed and the process kept: it is not this run's."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            return
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

    def start(self) -> None:
        """Measure from here. Memory that the process kept serves what comes."""
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


class TensorMemory(contextlib.AbstractContextManager["TensorMemory"]):
    """Context that measures how much memory the tensors of its body took at most, in ``mib``.

    The GPU's allocator keeps that number at no cost. On the CPU torch's profiler has to write down
    every allocation, which takes time: measure time elsewhere. (:class:`ProcessMemory` would be
    easier to read, but tells more about what ran before than about this body.)
    """

    mib: float

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = ProcessMemory(device) if device.type == "cuda" else None
        self._profile = contextlib.ExitStack()

    def __enter__(self) -> TensorMemory:
        if self._on_gpu:
            self._on_gpu.start()
            return self
        cpu = torch.profiler.ProfilerActivity.CPU
        with contextlib.ExitStack() as starting:  # Ctrl-C meanwhile gives stderr back
            starting.enter_context(silent_stderr())
            self._profiler = starting.enter_context(
                torch.profiler.profile(activities=[cpu], profile_memory=True)
            )
            self._profile = starting.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.close()
        if self._on_gpu:
            self.mib = self._on_gpu.peak() / 2**20
        elif error[0] is None:
            self.mib = _peak_bytes(self._profiler) / 2**20


def _peak_bytes(profiler: torch.profiler.profile) -> int:
    """The highest sum of allocations less releases, each counted at the end of its operation."""
    allocated = peak = 0
    for event in sorted(profiler.events(), key=lambda event: event.time_range.end):
        allocated += event.self_cpu_memory_usage
        peak = max(peak, allocated)
    return peak


@contextlib.contextmanager
def silent_stderr() -> Iterator[None]:
    """Send file descriptor 2 to nowhere: the profiler logs its start, and that it saw no GPU."""
    saved = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
