"""The core on 64-bit ARM: cross-compiled, and run by an emulator of that processor."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROCESSOR = "aarch64-linux-gnu"
COMPILER, EMULATOR = f"{PROCESSOR}-g++", "qemu-aarch64-static"

missing = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}"),
]


@pytest.fixture(scope="module")
def build():
    """The folder, which is kept: the next run compiles what changed."""
    folder = ROOT / "build" / "aarch64"
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=path)
    options = [f"-DPython_EXECUTABLE={sys.executable}", "-DAMPFUSE_HOST_EMULATION=ON"]
    toolchain = ROOT / "cmake" / "aarch64.cmake"
    commands = [
        [cmake, "-S", ROOT, "-B", folder, "--toolchain", toolchain, *options],
        [cmake, "--build", folder, "--parallel", "--target", "ampfuse_cpp_tests"],
    ]
    environment = {**os.environ, "PATH": path, "CMAKE_GENERATOR": "Ninja", "AMPFUSE_CUDA": "OFF"}
    for command in commands:
        subprocess.run(command, check=True, env=environment)
    return folder


@pytest.mark.parametrize("isa", ["scalar", "neon", "neon_bf16"])
def test_the_cores_tests_pass_on_arm(build, isa):
    """Each has the bits of the CUDA kernels, which are compiled for this processor too."""
    (program,) = build.rglob("ampfuse_cpp_tests")
    command = [EMULATOR, "-L", f"/usr/{PROCESSOR}", program]
    environment = {**os.environ, "AMPFUSE_CPU_ISA": isa}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr


def innermost_loops(file):
    """The instructions of each loop without a loop in it: from a jump's target to the jump."""
    command = [f"{PROCESSOR}-objdump", "-d", "--no-show-raw-insn", file]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for function in text.split("\n\n"):
        code = [
            (int(at, 16), instruction)
            for at, instruction in re.findall(r"^ *(\w+):\t(.*)", function, re.MULTILINE)
        ]
        loops = []
        for at, instruction in code:
            jump = re.match(r"(?:b|b\.\w+|cbn?z|tbn?z)\t.*?\b(\w+) <", instruction)
            if jump and code[0][0] <= int(jump[1], 16) <= at:
                loops.append((int(jump[1], 16), at))
        for first, last in loops:
            if sum(first <= begin and end <= last for begin, end in loops) == 1:
                yield [instruction for at, instruction in code if first <= at <= last]


def test_loops_are_vectorized(build):
    """No update computes element by element what NEON computes for four. (Layers merge the sums of
    a row's groups one by one.)"""
    arithmetic = r"f(?:add|sub|mul|div|sqrt|mla|mls|n?madd|n?msub)\t"
    files = sorted(build.glob("CMakeFiles/ampfuse_cpu_neon*/**/[kn]*.cpp.o"))
    assert files
    for file in files:
        vectors = 0
        for loop in innermost_loops(file):
            by_four = sum(bool(re.match(rf"{arithmetic}v\d+\.4s", i)) for i in loop)
            by_one = sum(bool(re.match(rf"{arithmetic}s\d+", i)) for i in loop)
            # (Two: what a block's scale takes, or a row's factor.)
            if file.name.startswith("kernels."):
                assert by_one <= max(2, by_four), "\n".join([str(file), *loop])
            vectors += by_four > 0
        assert vectors, file
