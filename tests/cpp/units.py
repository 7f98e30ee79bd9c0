"""The core's translation units and the flags of each, for builds of the core without torch.

CMakeLists.txt says the same for the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

ISA = {
    "scalar": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [f"-m{set}" for set in "avx512f avx512bw avx512dq avx512vl avx2 fma f16c".split()],
}


class Unit(NamedTuple):
    """`name` is one of its own; `source` is relative to the repository."""

    name: str
    source: str
    flags: list[str]


def core_units(isa: str) -> Iterator[Unit]:
    """The core and both backends, with the CPU's kernels of one instruction set: a program runs
    one."""
    only = f"-DAMPFUSE_HAS_{isa.upper()}"
    yield Unit("algorithms", "csrc/core/algorithms.cpp", [])
    for file in ("backend", "isa", "nn", "threads"):
        yield Unit(f"cpu-{file}", f"csrc/cpu/{file}.cpp", [only])
    for file in ("backend", "device_table", "graph_memory", "inspect", "tickets"):
        yield Unit(f"cuda-{file}", f"csrc/cuda/{file}.cu", [])
    for folder, cpu, cuda in (("ops", "kernels", "ops"), ("nn_ops", "nn", "nn")):
        for path in sorted((ROOT / "csrc/core" / folder).glob("*.h")):
            ops = path.stem
            if ops in ("op", "nn_op"):
                continue
            own = [f'-DAMPFUSE_OPS_HEADER="core/{folder}/{ops}.h"', f"-DAMPFUSE_OPS={ops}_ops"]
            yield Unit(f"cpu-{ops}", f"csrc/cpu/{cpu}_{isa}.cpp", [*ISA[isa], *own])
            if ops != "inspect":  # inspect.cu has its kernel
                yield Unit(f"cuda-{ops}", f"csrc/cuda/{cuda}.cu", own)
