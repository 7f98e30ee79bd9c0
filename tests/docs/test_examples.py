"""The examples run as they stand, and learn."""

from __future__ import annotations

import argparse
import csv
import runpy
from pathlib import Path

import pytest
import torch

from programs import python

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES = {"cifar_airbench_style": 150, "gpt": 120, "hf_finetune": 120, "lightning_digits": 120}
NEEDS = {
    "hf_finetune": ["transformers", "accelerate"],
    "lightning_digits": ["lightning", "sklearn"],
}
SMALL = {
    "gpt": ["--steps", "20", "--width", "64"],
    "hf_finetune": ["--pretrain-steps", "3", "--steps", "20"],
    "lightning_digits": ["--epochs", "1"],
}
BOUNDS = {"gpt": 4.0, "hf_finetune": 0.6, "lightning_digits": 1.0}  # the last losses of a small run
# Held-out loss, accuracy, accuracy after the run that the example describes.
GOALS = {"gpt": (1.0, 1.8), "hf_finetune": (0.88, 1.0), "lightning_digits": (0.93, 1.0)}
examples = pytest.mark.parametrize("name", list(SMALL))
# What takes seconds, and says little that the tests of integrations or another run do not.
SLOW = dict.fromkeys(NEEDS, pytest.mark.slow)


def run(name: str, *arguments: str) -> float:
    for package in NEEDS.get(name, []):
        pytest.importorskip(package)
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](list(arguments))


def losses(path: Path) -> list[float]:
    """Of all steps, which are numbered from 1."""
    steps, losses = zip(*csv.reader(path.open()), strict=True)
    assert (steps[0], losses[0]) == ("step", "loss")
    assert [int(step) for step in steps[1:]] == list(range(1, len(steps)))
    return [float(loss) for loss in losses[1:]]


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *(("gpt", "O5"), ("lightning_digits", "O5")),
        pytest.param("hf_finetune", "O5", marks=pytest.mark.slow),  # run by another test
        *(pytest.param(name, "O2", marks=pytest.mark.slow) for name in SMALL),
    ],
)
@pytest.mark.filterwarnings("ignore")  # the frameworks' advice
def test_example_learns(name, precision, tmp_path):
    file = tmp_path / "losses.csv"
    run(name, *SMALL[name], "--precision", precision, "--csv", str(file))
    *_, before, last = losses(file)
    assert (before + last) / 2 < BOUNDS[name]


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in SMALL])
def test_native_run_leaves_ampfuse_alone(name, tmp_path):
    for package in NEEDS.get(name, []):
        pytest.importorskip(package)
    file = tmp_path / "losses.csv"
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], None, '__main__')"
        "; assert not [name for name in sys.modules if name.partition('.')[0] == 'ampfuse']"
    )
    command = ["-c", code, EXAMPLES / f"{name}.py", *SMALL[name], "--precision", "native"]
    ran = python(*command, "--csv", file)
    assert ran.returncode == 0, ran.stderr
    *_, before, last = losses(file)
    assert (before + last) / 2 < BOUNDS[name]


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_example_takes_another_model(tmp_path):
    for package in NEEDS["hf_finetune"]:
        pytest.importorskip(package)
    script = runpy.run_path(str(EXAMPLES / "hf_finetune.py"))
    args = argparse.Namespace(precision="O5", pretrain_steps=2, seed=0)
    script["pretrain"](str(tmp_path), args)
    assert script["main"](["--model", str(tmp_path), "--steps", "3"]) > 0.4


@pytest.mark.slow
@examples
@pytest.mark.filterwarnings("ignore")
def test_example_reaches_its_goal(name):
    low, high = GOALS[name]
    assert low <= run(name) <= high


@pytest.mark.parametrize("name", LINES)
def test_example_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= LINES[name]


def test_cifar_example_learns_digits(capsys):
    pytest.importorskip("sklearn")
    assert run("cifar_airbench_style", "--data", "digits", "--epochs", "5", "--width", "8") > 0.8
    assert capsys.readouterr().out.count("accuracy") == 5


@pytest.mark.parametrize(
    "level", [pytest.param(level, marks=pytest.mark.slow) for level in ("O0", "O2", "O5")]
)
def test_cifar_example_learns_its_synthetic_images(level):
    small = ["--epochs", "2", "--width", "4"] if not torch.cuda.is_available() else []
    assert run("cifar_airbench_style", "--opt-level", level, *small) > 0.5


@pytest.mark.gpu
def test_cifar_example_captures_its_step(capsys):
    assert run("cifar_airbench_style", "--data", "synthetic") > 0.8
