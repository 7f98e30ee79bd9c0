"""The machine's limits ("copy", "limit", "products", "peak"; see docs/benchmarks.md), measured here
on arrays far larger than the caches. On a CPU the copy is an update in place, so that no memory is
read only to be overwritten.
"""

from __future__ import annotations

import ctypes
import math
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .measuring import Variant

Bounds = dict[str, Callable[[], float]]
Call = Callable[[], object]
_ELEMENTS = {"cpu": 1 << 27, "cuda": 1 << 29}  # FP32, of an array that is copied and read
_ITERATIONS = 5  # of Newton and Schulz


def bounds(clock: Any, params: int, update_bytes: float, inspect_bytes: float = 0) -> Bounds:
    """ "copy" and then "limit": functions that measure, and return milliseconds of a step of
    `params` parameters. `update_bytes` are read and written per parameter in the update,
    `inspect_bytes` read in the inspection before it."""
    on_gpu = clock.device.type == "cuda"
    copies, read, size = _cuda_loops(clock.device) if on_gpu else _cpu_loops()
    copy_ms_per_byte = math.nan  # as last measured: "limit" takes that of its round

    def copy() -> float:
        nonlocal copy_ms_per_byte
        copy_ms_per_byte = min(clock.milliseconds(call, 1.0) for call in copies) / (2 * size)
        return params * (update_bytes + inspect_bytes) * copy_ms_per_byte

    def limit() -> float:
        if math.isnan(copy_ms_per_byte):
            copy()
        inspect = clock.milliseconds(read, 1.0) / size * inspect_bytes
        return params * (update_bytes * copy_ms_per_byte + inspect)

    return {"copy": copy, "limit": limit}


def muon_bounds(gradients: list[Tensor], clock: Any) -> Bounds:
    """ "products" and "peak" of the gradients that are matrices."""
    from ampfuse.optim.muon import JORDAN, orthogonalize
    from ampfuse.optim.newton_schulz import operations, product_dtype

    how = {"ns_coefficients": JORDAN, "ns_steps": _ITERATIONS, "eps": 1e-7, "adjust_lr_fn": None}
    matrices = [gradient.flatten(1) for gradient in gradients if gradient.ndim > 1]
    device = gradients[0].device
    dtype = product_dtype(device)
    count = sum(min(operations(*sorted(matrix.shape), _ITERATIONS, dtype)) for matrix in matrices)
    left, right = (torch.randn(8, 1024, 1024).to(device, torch.bfloat16) for _ in range(2))

    def products() -> None:
        orthogonalize((matrix.clone(), how) for matrix in matrices)

    def peak() -> float:
        return count / (8 * 2 * 1024**3) * clock.milliseconds(lambda: torch.bmm(left, right))

    return {"products": Variant(clock, products), "peak": peak}


def _cpu_loops() -> tuple[list[Call], Call, int]:
    """Ways to copy and to read an array, on as many threads as torch uses, and its bytes."""
    update_in_place, threads = _compile(), torch.get_num_threads()
    array = torch.zeros(_ELEMENTS["cpu"]).add_(1)  # touched: pages exist
    pool, count = ThreadPoolExecutor(threads), array.numel() // threads

    def update(streams: int) -> None:
        starts = range(array.data_ptr(), array.data_ptr() + 4 * count * threads, 4 * count)
        list(pool.map(lambda start: update_in_place(start, count, streams), starts))

    # One array, or four at the same time as in a step: the faster one counts.
    return [partial(update, 1), partial(update, 4)], array.sum, 4 * array.numel()


def _cuda_loops(device: torch.device) -> tuple[list[Call], Call, int]:
    """torch's copy and sum, which reach a GPU's bandwidth."""
    source, target = (torch.zeros(_ELEMENTS["cuda"], device=device) for _ in range(2))
    return [lambda: target.copy_(source)], source.sum, 4 * source.numel()


@cache
def _compile() -> Any:
    """The function of ``limits.cpp``, with all that this machine's instruction set has."""
    source = Path(__file__).with_suffix(".cpp")
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    flags = ["-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC"]
    if "512" in torch.backends.cpu.get_cpu_capability():
        flags.append("-mprefer-vector-width=512")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "limits.so")
        subprocess.run([*compiler, *flags, str(source), "-o", str(library)], check=True)
        update_in_place = ctypes.CDLL(str(library)).update_in_place
    update_in_place.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    return update_in_place
