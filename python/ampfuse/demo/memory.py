"""Peak memory of a stretch of code, as well as the device can tell."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from types import TracebackType

import torch


class PeakMemory:
    """Context that measures how much memory its body needed at most.

    On a GPU: the most that torch had allocated at one time. On the CPU: how far the resident memory
    of the process rose above where it was at the start, as Linux counts it.

    ``mib`` is None where that is not to be had (another system, or a container that hides it).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mib: float | None = None
        self._start: int | None = None

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            _return_free_memory()
            self._start = _reset_peak()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.device.type == "cuda":
            self.mib = torch.cuda.max_memory_allocated(self.device) / 2**20
        elif self._start is not None:
            self.mib = (_status_kib("VmHWM") - self._start) / 2**10


def _return_free_memory() -> None:
    """Hand the heap's free pages back to the system: reused ones would not count as a rise."""
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _reset_peak() -> int | None:
    """Lower the process's peak to what is resident now, and return that in KiB."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return _status_kib("VmRSS")
    except OSError:
        return None


def _status_kib(name: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(name + ":"):
                return int(line.split()[1])
    raise OSError(f"/proc/self/status has no {name}")
