"""The core's translation units and the flags of each, for builds of the core without torch.

CMakeLists.txt says the same for the module. ``python tests/cpp/units.py`` prints a unit a line: its
name, its source, its flags.
"""

from __future__ import annotations

import platform
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


def _ops(header: str, folder: str = "ops") -> list[str]:
    return [f'-DAMPFUSE_OPS_HEADER="core/{folder}/{header}.h"', f"-DAMPFUSE_OPS={header}_ops"]


def _headers(folder: str, apart: str) -> list[str]:
    return sorted(p.stem for p in (ROOT / "csrc/core" / folder).glob("*.h") if p.stem != apart)


HEADERS = _headers("ops", "op")
NN_HEADERS = _headers("nn_ops", "nn_op")


def cpu_units() -> list[Unit]:
    """The core and the CPU backend, for this machine's processor."""
    sets = ISA if platform.machine() == "x86_64" else ["scalar"]
    return [
        Unit("algorithms", "csrc/core/algorithms.cpp", []),
        *(
            Unit(f"cpu-{name}", f"csrc/cpu/{name}.cpp", [])
            for name in ("backend", "isa", "nn", "threads")
        ),
        *(
            Unit(f"{isa}-{header}", f"csrc/cpu/nn_{isa}.cpp", ISA[isa] + _ops(header, "nn_ops"))
            for isa in sets
            for header in NN_HEADERS
        ),
        *(
            Unit(f"{isa}-{header}", f"csrc/cpu/kernels_{isa}.cpp", ISA[isa] + _ops(header))
            for isa in sets
            for header in HEADERS
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
    for unit in cpu_units() + cuda_units():
        print(unit.name, unit.source, *unit.flags)
