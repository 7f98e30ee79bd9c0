"""The tests of the torch-free core (tests/cpp), which are a program of their own."""

import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = Path(__file__).with_name("ampfuse_cpp_tests")
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]


def run(program, **environment):
    result = subprocess.run(
        [str(program)], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(not PROGRAM.exists(), reason="built with AMPFUSE_HOST_EMULATION=ON only")
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
def test_cpp(order):
    """Kernels depend on the order of neither blocks nor threads."""
    run(PROGRAM, AMPFUSE_EMULATED_BLOCK_ORDER=order)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_cpp_under_sanitizers(tmp_path):
    """No access out of bounds and nothing undefined, on both backends."""
    flags = ["-std=c++17", "-O1", "-g", "-ffp-contract=off", "-fno-strict-aliasing"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    flags += [
        "-Wall",
        "-Wextra",
        "-Wno-unknown-pragmas",
        f"-I{ROOT}/tests/host_cuda",
        f"-I{ROOT}/csrc",
    ]

    def options(source):
        if source.suffix == ".cu":
            return ["-x", "c++"]
        return {"kernels_avx2": AVX2, "kernels_avx512": AVX512}.get(source.stem, [])

    def compile_one(source):
        target = tmp_path / f"{source.parent.name}-{source.name}.o"
        command = ["g++", *flags, *options(source), "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        return str(target)

    folders = ["csrc/cpu/*.cpp", "csrc/cuda/*.cu", "tests/host_cuda/*.cpp", "tests/cpp/*.cpp"]
    sources = [source for folder in folders for source in sorted(ROOT.glob(folder))]
    if platform.machine() != "x86_64":
        sources = [source for source in sources if "kernels_avx" not in source.name]
    if platform.machine() != "aarch64":
        sources = [source for source in sources if "kernels_neon" not in source.name]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    subprocess.run(["g++", *flags, *objects, "-o", str(tmp_path / "tests")], check=True)
    run(tmp_path / "tests")
