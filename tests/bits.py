"""The results of training, to the last bit: a SHA-256 for each of a fixed set of runs.

    python tests/bits.py            prints a line per run: ISA, threads, backend, run, hash
    python tests/bits.py --write    writes the hashes to tests/data/bits.json

A hash covers everything that a training leaves behind: weights, masters, optimizer states, loss
scales, gradients, and the norm and skip decision of each step. A change of the code that is meant
to change no result leaves every hash as it is; ``test_bits.py`` compares them. The script also runs
on an older version (``PYTHONPATH=<its python folder>``).

The instruction set, the number of threads and the backend have no part in a hash; nor should torch
and the machine (see ``trainings.py``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import unittest.mock
import warnings
from pathlib import Path

import torch

import conftest
from ampfuse import _core
from cases import ISAS, digest
from programs import python
from trainings import RUNS

FILE = Path(__file__).parent / "data" / "bits.json"


def hashes() -> dict[str, str]:
    """The hash of each run, with the instruction set, threads and backend in force."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: digest(run()) for name, run in RUNS.items()}


def hashes_of(isa: str, threads: int) -> dict[str, str]:
    """The same with this instruction set and number of threads, from a process of its own."""
    child = python(__file__, "--threads", threads, AMPFUSE_CPU_ISA=isa)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--threads", type=int, help="the hashes with so many threads, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads or 1)
    if arguments.threads:
        print(json.dumps(hashes()))
        return
    hashes_by_run = {}
    for isa, threads in itertools.product(ISAS[_core.C.cpu_isa()], (1, 2)):
        hashes_by_run[f"{isa} {threads} cpu"] = hashes_of(isa, threads)
    with unittest.mock.patch.object(_core, "C", conftest.emulated_module()):
        hashes_by_run["emulated 1 cuda"] = hashes()
    for where, runs in hashes_by_run.items():
        for name, hashed in runs.items():
            print(f"{where:<16} {name:<40} {hashed}")
    first, *others = hashes_by_run.values()
    if any(other != first for other in others):
        sys.exit("The hashes depend on the instruction set, the threads or the backend.")
    if arguments.write:
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(first, indent=1) + "\n")


if __name__ == "__main__":
    main()
