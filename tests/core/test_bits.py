"""No result changes: the runs of ``bits.py`` give the hashes that an earlier version gave."""

import json

import pytest

import bits
import cases
from ampfuse import _core

EXPECTED = json.loads(bits.FILE.read_text())


def assert_as_before(found):
    assert found.keys() == EXPECTED.keys(), "run tests/bits.py --write"
    different = [name for name, hashed in EXPECTED.items() if found[name] != hashed]
    assert not different, f"results differ from the earlier version's: {different}"


def test_results_are_those_of_the_earlier_version():
    assert_as_before(bits.hashes())


# test_same_bits.py runs every kernel of the other instruction sets and of CUDA.
ISAS = [
    pytest.param(isa, marks=() if isa == "scalar" else pytest.mark.slow)
    for isa in cases.ISAS[_core.C.cpu_isa()]
]


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets_and_threads_give_the_same_results(isa):
    assert_as_before(bits.hashes_of(isa, threads=2))


@pytest.mark.slow
def test_the_cuda_kernels_give_the_same_results(emulated):
    assert_as_before(bits.hashes())
