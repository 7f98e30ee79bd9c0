"""Peak memory of a stretch of code: the most that torch had allocated at one time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch


class PeakMemory:
    """Context that measures how much memory the tensors of its body took at most, in ``mib``.

    The GPU's allocator keeps that number at no cost. On the CPU torch's profiler has to write down
    every allocation, which takes time: measure time elsewhere. (The resident memory of the process
    would be easier to read, but tells more about what ran before than about this body.)
    """

    mib: float

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._profile = contextlib.ExitStack()

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            cpu = torch.profiler.ProfilerActivity.CPU
            self._profile.enter_context(silent_stderr())
            self._profiler = self._profile.enter_context(
                torch.profiler.profile(activities=[cpu], profile_memory=True)
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.close()
        if self.device.type == "cuda":
            self.mib = torch.cuda.max_memory_allocated(self.device) / 2**20
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
