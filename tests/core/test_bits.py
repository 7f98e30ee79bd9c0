"""No result changes: the runs of ``bits.py`` give the hashes that an earlier version gave."""

import json

import pytest

import bits
import cases
from ampfuse import _core

EXPECTED = json.loads(bits.FILE.read_text())


def assert_as_before(found, expected=EXPECTED):
    assert found.keys() == expected.keys(), "run tests/bits.py --write"
    different = [name for name, hashed in expected.items() if found[name] != hashed]
    assert not different, f"results differ from the earlier version's: {different}"


def test_results_are_those_of_the_earlier_version():
    assert_as_before(bits.hashes())


def test_the_narrowest_kernels_give_the_same_results_on_two_threads():
    """Without levels, which call the same ones."""
    found = bits.hashes_of("scalar", threads=2, without_levels=True)
    kernels = {name: EXPECTED[name] for name in EXPECTED if name.split()[0] not in ("amp", "apex")}
    assert_as_before(found, kernels)


@pytest.mark.slow
@pytest.mark.parametrize("isa", cases.ISAS[_core.C.cpu_isa()])
def test_instruction_sets_and_threads_give_the_same_results(isa):
    assert_as_before(bits.hashes_of(isa, threads=2))


@pytest.mark.slow
def test_the_cuda_kernels_give_the_same_results(emulated):
    assert_as_before(bits.hashes())
