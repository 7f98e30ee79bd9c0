"""The examples run as they stand, and learn."""

from __future__ import annotations

import argparse
import csv
import re
import runpy
from pathlib import Path

import pytest
import torch

import ampfuse
from cases import NEEDS_BF16
from programs import python, ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES = {"cifar_airbench_style": 150, "gpt": 120, "hf_finetune": 120, "lightning_digits": 120}
LINES |= {"finetune_llama_one_gpu": 150, "finetune_llama_fsdp": 150}
NEEDS = {
    "finetune_llama_one_gpu": ["transformers"],
    "hf_finetune": ["transformers", "accelerate"],
    "lightning_digits": ["lightning", "sklearn"],
}
SMALL = {
    "gpt": ["--steps", "20", "--width", "64"],
    "hf_finetune": ["--pretrain-steps", "3", "--steps", "20"],
    "lightning_digits": ["--epochs", "1"],
}
# The last losses of a small run. The first of gpt is 5.62 and its last 3.81; those of
# lightning_digits are 2.42 and 0.18.
BOUNDS = {"gpt": 4.0, "hf_finetune": 0.6, "lightning_digits": 1.0}
# Held-out loss, accuracy, accuracy after the run that the example describes.
GOALS = {"gpt": (1.0, 1.8), "hf_finetune": (0.88, 1.0), "lightning_digits": (0.93, 1.0)}

pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' advice


def slow(*values: str) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


def import_needs(name: str) -> None:
    for package in NEEDS.get(name, []):
        pytest.importorskip(package)


def run(name: str, *arguments: str) -> float:
    import_needs(name)
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](list(arguments))


def assert_learned(path: Path, bound: float) -> None:
    """By the losses of all steps, which are numbered from 1."""
    steps, losses = zip(*csv.reader(path.open()), strict=True)
    assert (steps[0], losses[0]) == ("step", "loss")
    assert [int(step) for step in steps[1:]] == list(range(1, len(steps)))
    assert (float(losses[-2]) + float(losses[-1])) / 2 < bound


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *(("gpt", "O5"), ("lightning_digits", "O5")),
        slow("hf_finetune", "O5"),  # run by another test
        *(slow(name, "O2") for name in SMALL),
    ],
)
def test_example_learns(name, precision, tmp_path):
    file = tmp_path / "losses.csv"
    run(name, *SMALL[name], "--precision", precision, "--csv", str(file))
    assert_learned(file, BOUNDS[name])


# The others take seconds, and say little that the tests of integrations do not.
@pytest.mark.parametrize(
    "name",
    [
        "gpt",
        pytest.param("hf_finetune", marks=pytest.mark.exhaustive),
        slow("lightning_digits"),
    ],
)
def test_native_run_leaves_ampfuse_alone(name, tmp_path):
    import_needs(name)
    file = tmp_path / "losses.csv"
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], None, '__main__')"
        "; assert not [name for name in sys.modules if name.partition('.')[0] == 'ampfuse']"
    )
    command = ["-c", code, EXAMPLES / f"{name}.py", *SMALL[name], "--precision", "native"]
    ran = python(*command, "--csv", file)
    assert ran.returncode == 0, ran.stderr
    assert_learned(file, BOUNDS[name])


def test_hugging_face_example_takes_another_model(tmp_path):
    import_needs("hf_finetune")
    script = runpy.run_path(str(EXAMPLES / "hf_finetune.py"))
    args = argparse.Namespace(precision="O5", pretrain_steps=2, seed=0)
    script["pretrain"](str(tmp_path), args)
    assert script["main"](["--model", str(tmp_path), "--steps", "3"]) > 0.4


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",  # without the instructions its products take six minutes
    [pytest.param(name, marks=[NEEDS_BF16] if name == "gpt" else []) for name in GOALS],
)
def test_example_reaches_its_goal(name):
    low, high = GOALS[name]
    assert low <= run(name) <= high


@pytest.mark.parametrize("name", LINES)
def test_example_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= LINES[name]


@pytest.mark.parametrize(("level", "passes"), [("O5", "1"), slow("O5", "2"), ("O2", "1")])
def test_the_language_model_goes_on_with_the_same_bits(
    level, passes, tmp_path, capsys, monkeypatch
):
    import_needs("finetune_llama_one_gpu")
    file = tmp_path / "checkpoint.pt"
    small = ["--batch", "2", "--length", "32", "--passes", passes, "--level", level]
    script = runpy.run_path(str(EXAMPLES / "finetune_llama_one_gpu.py"))
    whole = script["main"]([*small, "--steps", "20"])
    assert sum(whole[-5:]) / 5 < 4.5 < whole[0]
    assert f"{level} fits as it is." in capsys.readouterr().out
    monkeypatch.setattr(ampfuse, "plan", lambda *_, **options: "")  # it takes most of the time
    first = script["main"]([*small, "--steps", "3", "--checkpoint", str(file)])
    assert first + script["main"]([*small, "--steps", "20", "--checkpoint", str(file)]) == whole
    bits = torch.load(file, weights_only=True)
    params = sum(weight.numel() for weight in bits["model"].values())
    # Weights and remainders of 2 bytes, 2.1 of states; small tensors have FP32 states.
    assert file.stat().st_size < 6.5 * params + 50_000


def test_the_language_model_takes_a_folder(tmp_path, monkeypatch):
    import_needs("finetune_llama_one_gpu")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(ampfuse, "plan", lambda build, *_, **options: build())
    script = runpy.run_path(str(EXAMPLES / "finetune_llama_one_gpu.py"))
    args = argparse.Namespace(model=None, shape="small", level="O5")
    script["build"](args).decoder.save_pretrained(tmp_path)
    transformers.ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path)  # its bytes begin at 3
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 100)
    small = ["--batch", "2", "--length", "32", "--steps", "12", "--text", str(text)]
    losses = script["main"]([*small, "--model", str(tmp_path), "--lr", "5e-3"])
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [[], ["--compile"]], ids=["eager", "compiled"])
def test_the_sharded_language_model_goes_on_with_the_same_bits(tmp_path, compiled):
    import_needs("finetune_llama_one_gpu")
    small = [EXAMPLES / "finetune_llama_fsdp.py", "--length", "32", "--batch", "4", *compiled]
    whole = ranks(2, *small, "--steps", "20")[0].stdout
    assert 2 < float(re.findall(r"step 10: loss ([\d.]+)", whole)[0]) < 4.5
    checkpoint = ["--checkpoint", tmp_path]
    ranks(2, *small, "--steps", "10", *checkpoint)
    rest = ranks(2, *small, "--steps", "20", *checkpoint)[0].stdout
    last = re.findall(r"step 20: loss [\d.]+", whole)
    assert re.findall(r"step 20: loss [\d.]+", rest) == last
    ranks(1, *small, "--steps", "30", *checkpoint)  # by another number of ranks
    assert (tmp_path / "30" / ".metadata").exists()


def test_cifar_example_learns_digits(capsys):
    pytest.importorskip("sklearn")
    assert run("cifar_airbench_style", "--data", "digits", "--epochs", "5", "--width", "8") > 0.8
    assert capsys.readouterr().out.count("accuracy") == 5


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_cifar_example_learns_its_synthetic_images(level):
    small = ["--epochs", "2", "--width", "4"] if not torch.cuda.is_available() else []
    assert run("cifar_airbench_style", "--opt-level", level, *small) > 0.5


@pytest.mark.gpu
def test_cifar_example_captures_its_step(capsys):
    assert run("cifar_airbench_style", "--data", "synthetic") > 0.8
