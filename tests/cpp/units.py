"""The core's translation units and the flags of each, for builds of the core without torch.

CMakeLists.txt says the same for the module. ``python tests/cpp/units.py avx2`` prints a unit a
line: its name, its source, its flags.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

ISA = {
    "scalar": ("kScalar", []),
    "avx2": ("kAvx2", ["-mavx2", "-mfma", "-mf16c"]),
    "avx512": (
        "kAvx512",
        [f"-m{set}" for set in "avx512f avx512bw avx512dq avx512vl avx2 fma f16c".split()],
    ),
}


class Unit(NamedTuple):
    """`name` is one of its own; `source` is relative to the repository."""

    name: str
    source: str
    flags: list[str]


def _ops(header: str, folder: str = "ops") -> list[str]:
    return [f'-DAMPFUSE_OPS_HEADER="core/{folder}/{header}.h"', f"-DAMPFUSE_OPS={header}_ops"]


def _headers(folder: str, apart: str) -> list[str]:
    return sorted(p.stem for p in (ROOT / "csrc/core" / folder).glob("*.h") if p.stem != apart)


HEADERS = _headers("ops", "op")
NN_HEADERS = _headers("nn_ops", "nn_op")


def cpu_units(isa: str) -> list[Unit]:
    """The core and the CPU backend, with the kernels of one instruction set: a program runs one."""
    name, flags = ISA[isa]
    only = f"-DAMPFUSE_ONLY_ISA={name}"
    return [
        Unit("algorithms", "csrc/core/algorithms.cpp", []),
        *(
            Unit(f"cpu-{name}", f"csrc/cpu/{name}.cpp", [only])
            for name in ("backend", "isa", "nn", "threads")
        ),
        *(
            Unit(f"cpu-{header}", f"csrc/cpu/kernels_{isa}.cpp", [only, *flags, *_ops(header)])
            for header in HEADERS
        ),
        *(
            Unit(f"cpu-{header}", f"csrc/cpu/nn_{isa}.cpp", [only, *flags, *_ops(header, "nn_ops")])
            for header in NN_HEADERS
        ),
    ]


def cuda_units() -> list[Unit]:
    """The CUDA backend. inspect.cu has the kernel of core/ops/inspect.h."""
    return [
        *(
            Unit(f"cuda-{name}", f"csrc/cuda/{name}.cu", [])
            for name in ("backend", "device_table", "inspect")
        ),
        *(
            Unit(f"cuda-{header}", "csrc/cuda/ops.cu", _ops(header))
            for header in HEADERS
            if header != "inspect"
        ),
        *(
            Unit(f"cuda-{header}", "csrc/cuda/nn.cu", _ops(header, "nn_ops"))
            for header in NN_HEADERS
        ),
    ]


if __name__ == "__main__":
    for unit in cpu_units(sys.argv[1]) + cuda_units():
        print(unit.name, unit.source, *unit.flags)
