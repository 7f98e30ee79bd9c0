"""The tests of the torch-free core (tests/cpp), which are a program of their own."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ampfuse import _core
from cpp.units import Unit, cpu_units, cuda_units

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "ampfuse_cpp_tests"


def run(program, **environment):
    result = subprocess.run(
        [str(program)], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(not PROGRAM.exists(), reason="built with AMPFUSE_HOST_EMULATION=ON only")
@pytest.mark.parametrize(
    "order", [*(pytest.param(o, marks=pytest.mark.slow) for o in ("forward", "reverse")), "random"]
)
def test_cpp(order):
    """Kernels depend on the order of neither blocks nor threads."""
    run(PROGRAM, AMPFUSE_EMULATED_BLOCK_ORDER=order)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_cpp_under_sanitizers(tmp_path):
    """No access out of bounds and nothing undefined, on both backends."""
    # -g1 has the lines that reports name; more takes a third longer to compile.
    flags = ["-std=c++17", "-O1", "-g1", "-ffp-contract=off", "-fno-strict-aliasing"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    flags += [
        "-Wall",
        "-Wextra",
        "-Wno-unknown-pragmas",
        f"-I{ROOT}/tests/host_cuda",
        f"-I{ROOT}/csrc",
    ]

    def compile_one(unit):
        target = tmp_path / f"{unit.name}.o"
        own = [*unit.flags, *(["-x", "c++"] if unit.source.endswith(".cu") else [])]
        if any(flag.startswith("-DAMPFUSE_OPS=") for flag in own):
            # Kernels are expressions of values; the scopes of all their temporaries took four
            # fifths of the time.
            own.append("-fno-sanitize-address-use-after-scope")
        command = ["g++", *flags, *own, "-c", unit.source, "-o", str(target)]
        subprocess.run(command, check=True, cwd=ROOT)
        return str(target)

    units = cpu_units(_core.C.cpu_isa()) + cuda_units()  # of no set that would not run
    for folder in ("tests/host_cuda", "tests/cpp"):
        for source in sorted(ROOT.glob(f"{folder}/*.cpp")):
            units.append(Unit(f"test-{source.stem}", str(source), []))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, units))
    subprocess.run(["g++", *flags, *objects, "-o", str(tmp_path / "tests")], check=True)
    run(tmp_path / "tests")
