"""The examples run as they stand, and learn."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def accuracy(*arguments: str) -> float:
    main = runpy.run_path(str(EXAMPLES / "cifar_airbench_style.py"))["main"]
    return main(list(arguments))


def test_cifar_example_learns_digits(capsys):
    pytest.importorskip("sklearn")
    assert accuracy("--data", "digits", "--epochs", "5", "--width", "8") > 0.8
    assert capsys.readouterr().out.count("accuracy") == 5


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_cifar_example_learns_its_synthetic_images(level):
    small = ["--epochs", "2", "--width", "4"] if not torch.cuda.is_available() else []
    assert accuracy("--opt-level", level, *small) > 0.5


@pytest.mark.gpu
def test_cifar_example_captures_its_step(capsys):
    assert accuracy("--data", "synthetic") > 0.8


def test_cifar_example_is_short():
    assert len((EXAMPLES / "cifar_airbench_style.py").read_text().splitlines()) <= 150
