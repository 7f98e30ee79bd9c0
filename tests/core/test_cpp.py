"""The tests of the torch-free core (tests/cpp), which are a program of their own."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from ampfuse import _core
from cases import ISAS

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "ampfuse_cpp_tests"
FLAGS = [
    *("-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "-g1",  # has the lines that reports name; more takes a third longer to compile
    *("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Itests/host_cuda", "-Icsrc"),
]


def run(program, **environment):
    result = subprocess.run(
        [str(program)], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stdout + result.stderr


def slow(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


built = pytest.mark.skipif(not PROGRAM.exists(), reason="built with AMPFUSE_HOST_EMULATION=ON only")


@built
@pytest.mark.parametrize("order", [*slow("forward", "reverse"), "random"])
def test_the_cores_tests_pass_in_any_order_of_blocks(order):
    """Kernels depend on the order of neither blocks nor threads."""
    run(PROGRAM, AMPFUSE_EMULATED_BLOCK_ORDER=order)


# In quick tests test_bits.py runs each kernel of the narrowest.
NARROWER = slow(*ISAS[_core.C.cpu_isa()][:-1])


@built
@pytest.mark.parametrize("isa", NARROWER)
def test_narrower_instruction_sets_pass_the_cpp_tests(isa):
    """Each has the bits of the CUDA kernels, as the widest has above."""
    run(PROGRAM, AMPFUSE_CPU_ISA=isa)


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@needs_compiler
@pytest.mark.parametrize(("arch", "is_qualified"), [(600, False), (610, False), (700, True)])
def test_grid_constants_are_for_volta_and_later(arch, is_qualified):
    """The toolkits here compile for no GPU that old; they only preprocess."""
    options = ("-std=c++17", f"-D__CUDA_ARCH__={arch}", "-Itests/host_cuda", "-Icsrc")
    command = ["g++", "-E", "-P", "-x", "c++", *options, "csrc/cuda/inspect.cu"]
    code = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    (qualifiers,) = re.findall(r"inspect_kernel\(const (.*?)TableView", code)
    assert bool(qualifiers) == is_qualified


FLAGS_OF = {
    "scalar": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [f"-m{set}" for set in "avx512f avx512bw avx512dq avx512vl avx2 fma f16c".split()],
}


class Unit(NamedTuple):
    """A translation unit of the core, as CMakeLists.txt builds it for the module: `name` is one of
    its own; `source` is relative to the repository."""

    name: str
    source: str
    flags: list[str]


def core_units(isa: str) -> Iterator[Unit]:
    """The core and both backends, with the CPU's kernels of one instruction set: a program runs
    one."""
    only = [f"-DAMPFUSE_ISAS={isa.capitalize()}"]
    kernels = [f"-DAMPFUSE_ISA={isa.capitalize()}", f'-DAMPFUSE_SIMD_HEADER="simd_{isa}.h"']
    yield Unit("algorithms", "csrc/core/algorithms.cpp", [])
    for file in ("backend", "isa", "nn", "threads"):
        yield Unit(f"cpu-{file}", f"csrc/cpu/{file}.cpp", only)
    for file in ("backend", "device_table", "graph_memory", "inspect", "tickets"):
        yield Unit(f"cuda-{file}", f"csrc/cuda/{file}.cu", [])
    for folder, cpu, cuda in (("ops", "kernels", "ops"), ("nn_ops", "nn_kernels", "nn")):
        for path in sorted((ROOT / "csrc/core" / folder).glob("*.h")):
            ops = path.stem
            if ops in ("op", "nn_op"):
                continue
            own = [f'-DAMPFUSE_OPS_HEADER="core/{folder}/{ops}.h"', f"-DAMPFUSE_OPS={ops}_ops"]
            of_isa = [*FLAGS_OF[isa], *only, *kernels, *own]
            yield Unit(f"cpu-{ops}", f"csrc/cpu/{cpu}.cpp", of_isa)
            if ops != "inspect":  # inspect.cu has its kernel
                yield Unit(f"cuda-{ops}", f"csrc/cuda/{cuda}.cu", own)


@pytest.mark.slow
@needs_compiler
def test_cpp_under_sanitizers(tmp_path):
    """No access out of bounds and nothing undefined, on both backends."""

    def compile_one(unit):
        target = str(tmp_path / f"{unit.name}.o")
        own = [*unit.flags, *(["-x", "c++"] if unit.source.endswith(".cu") else [])]
        if any(flag.startswith("-DAMPFUSE_OPS=") for flag in own):
            # Kernels are expressions of values; the scopes of all their temporaries took four
            # fifths of the time.
            own.append("-fno-sanitize-address-use-after-scope")
            if not unit.source.endswith(".cu"):  # they may read and write at any address
                own.append("-fno-sanitize=alignment,null,pointer-overflow,return,vptr")
        subprocess.run(["g++", *FLAGS, *own, "-c", unit.source, "-o", target], check=True, cwd=ROOT)
        return target

    units = list(core_units(_core.C.cpu_isa()))  # of no set that would not run
    for source in (*ROOT.glob("tests/host_cuda/*.cpp"), *ROOT.glob("tests/cpp/*.cpp")):
        units.append(Unit(f"test-{source.stem}", str(source), []))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, units))
    subprocess.run(["g++", *FLAGS, *objects, "-o", str(tmp_path / "tests")], check=True)
    run(tmp_path / "tests")
