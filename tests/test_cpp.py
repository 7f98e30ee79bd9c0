"""The tests of the torch-free core (tests/cpp), which are a program of their own."""

import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("ampfuse_cpp_tests")


@pytest.mark.skipif(not PROGRAM.exists(), reason="built with AMPFUSE_HOST_EMULATION=ON only")
def test_cpp():
    run = subprocess.run([str(PROGRAM)], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
