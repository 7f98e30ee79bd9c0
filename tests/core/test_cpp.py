"""The tests of the torch-free core (tests/cpp), which are a program of their own."""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import bits
from ampfuse import _core
from cpp.units import Unit, core_units

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
def test_cpp(order):
    """Kernels depend on the order of neither blocks nor threads."""
    run(PROGRAM, AMPFUSE_EMULATED_BLOCK_ORDER=order)


# In quick tests test_bits.py runs each kernel of the narrowest.
NARROWER = slow(*bits.ISAS[_core.C.cpu_isa()][:-1])


@built
@pytest.mark.parametrize("isa", NARROWER)
def test_narrower_instruction_sets(isa):
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
