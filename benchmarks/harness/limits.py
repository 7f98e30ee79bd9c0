"""What the machine can do at best, for the benchmarks to divide by.

copy
    The step's bytes at the bandwidth of copying: as many read as written, each once. On a GPU a
    copy from device to device; on a CPU an in-place update, where nothing is read for the sake of
    being overwritten.
limit
    The bytes of the update at that bandwidth, and the bytes of the inspection at the bandwidth of
    reading.

All are measured here, on arrays far larger than the caches.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch


def bounds(
    device: torch.device, array_bytes: int, params: int, update_bytes: int, inspect_bytes: int
) -> dict[str, Callable[[], float]]:
    """ "copy" and "limit": functions that measure now, and return milliseconds of a step.

    Call "copy" first: "limit" takes the bandwidth that it found.

    Arguments:
        array_bytes: size of the arrays that bandwidth is measured on.
        params: how many parameters are stepped.
        update_bytes, inspect_bytes: read and written per parameter in the update, and read in the
            inspection before it.
    """
    machine = _Cuda(device, array_bytes) if device.type == "cuda" else _Cpu(array_bytes)
    copied = 0.0

    def copy() -> float:
        nonlocal copied
        copied = machine.copy_seconds_per_byte()
        return params * (update_bytes + inspect_bytes) * copied * 1e3

    def limit() -> float:
        update = params * update_bytes * copied
        inspect = params * inspect_bytes * machine.read_seconds_per_byte()
        return (update + inspect) * 1e3

    return {"copy": copy, "limit": limit}


class _Cpu:
    """Loops of ``limits.cpp``, on as many threads as torch uses."""

    def __init__(self, array_bytes: int) -> None:
        self._library = _compile()
        self._array = torch.zeros(array_bytes // 4).add_(1)  # touched: pages exist
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads)

    def _seconds(self, call: Callable[[int], object]) -> float:
        start = time.perf_counter()
        list(self._pool.map(call, range(self._threads)))
        return time.perf_counter() - start

    def _share(self, thread: int) -> tuple[int, int]:
        count = self._array.numel() // self._threads
        return self._array.data_ptr() + 4 * count * thread, count

    def copy_seconds_per_byte(self) -> float:
        def update(streams: int) -> float:
            loop = self._library.update_in_place
            return self._seconds(lambda thread: loop(*self._share(thread), streams))

        # One array, or four walked side by side as a step does: whichever the machine likes best.
        return min(update(1), update(4)) / (8 * self._array.numel())

    def read_seconds_per_byte(self) -> float:
        seconds = self._seconds(lambda thread: self._library.read(*self._share(thread)))
        return seconds / (4 * self._array.numel())


class _Cuda:
    """torch's copy and sum, which reach a GPU's bandwidth."""

    def __init__(self, device: torch.device, array_bytes: int) -> None:
        self._from, self._to = (torch.zeros(array_bytes // 8, device=device) for _ in range(2))

    def _seconds(self, call: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # cycles: the host is ahead when the measured work begins
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def copy_seconds_per_byte(self) -> float:
        return self._seconds(lambda: self._to.copy_(self._from)) / (8 * self._from.numel())

    def read_seconds_per_byte(self) -> float:
        return self._seconds(lambda: self._from.sum()) / (4 * self._from.numel())


def _compile() -> ctypes.CDLL:
    """``limits.cpp`` with all that this machine's instruction set has."""
    source = Path(__file__).with_suffix(".cpp")
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ["-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC"]
    if "512" in torch.backends.cpu.get_cpu_capability():
        flags.append("-mprefer-vector-width=512")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "limits.so")
        subprocess.run([*compiler, *flags, str(source), "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
    loaded.read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    loaded.update_in_place.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    return loaded
