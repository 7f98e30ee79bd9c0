"""What a run is measured with: a clock of training steps, the peak of memory, the kernels used."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ampfuse.demo.memory import silent_stderr


class StepClock:
    """Milliseconds of each training step, from the end of the one before to its own end.

    So a step includes the wait for its data. On a GPU the times are those of device events, which
    are read when the host waits anyway (:meth:`flush`). Between :meth:`pause` and :meth:`resume`
    (evaluation, checkpoints) nothing counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[float | torch.cuda.Event] = []

    def resume(self) -> None:
        """Steps begin now."""
        self._wait()
        self._marks = [self._now()]

    def mark(self) -> None:
        """A step has ended."""
        self._marks.append(self._now())

    def flush(self) -> list[float]:
        """The steps since the last flush, in milliseconds. Waits for the device."""
        self._wait()
        marks, self._marks = self._marks, self._marks[-1:]
        return [self._elapsed(a, b) for a, b in itertools.pairwise(marks)]

    def _now(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _elapsed(self, begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
        if isinstance(begin, torch.cuda.Event):
            return begin.elapsed_time(end)
        return (end - begin) * 1e3  # type: ignore[operator]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class RunMemory:
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
        """Measure from here. Memory that the rehearsal left to the process serves the run."""
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


# Words in the names of torch's operations, and what they stand for. The first that fits counts.
_CONVOLUTIONS = (
    ("cudnn_convolution", "cudnn"),
    ("miopen_convolution", "miopen"),
    ("mkldnn_convolution", "onednn"),
    ("_conv_depthwise", "native"),
    ("slow_conv", "native"),
    ("thnn_conv", "native"),
    ("convolution_overrideable", "other"),
)
_BATCH_NORMS = (
    ("cudnn_batch_norm", "cudnn"),
    ("miopen_batch_norm", "miopen"),
    ("native_batch_norm", "native"),
    ("batch_norm_elemt", "native"),
)


def kernels_used(step: Callable[[], object], device: torch.device) -> dict[str, object]:
    """Run `step` once and see who served its convolutions and batch norms.

    Returns:
        ``cudnn`` (its version, or None on the CPU), ``convolution`` and ``batch_norm``: "cudnn",
        "onednn", "native", ... or None where the step has none.
    """
    cuda = device.type == "cuda"
    with silent_stderr(), torch.profiler.profile(activities=_ACTIVITIES[cuda]) as profiler:
        step()
    names = {event.key for event in profiler.key_averages()}
    return {
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "convolution": _server(names, _CONVOLUTIONS),
        "batch_norm": _server(names, _BATCH_NORMS),
    }


_CPU = torch.profiler.ProfilerActivity.CPU
_ACTIVITIES = {False: [_CPU], True: [_CPU, torch.profiler.ProfilerActivity.CUDA]}


def _server(names: set[str], words: tuple[tuple[str, str], ...]) -> str | None:
    found = [server for word, server in words if any(word in name for name in names)]
    return found[0] if found else None
