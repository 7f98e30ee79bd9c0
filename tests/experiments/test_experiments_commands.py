"""Each published experiment by its documented command, small: on synthetic data and on files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from data_files import no_checksums as no_checksums
from data_files import write_cifar, write_imagenet, write_mnist

pytest.importorskip("torchvision")
pytest.importorskip("timm")
pytest.importorskip("sklearn")

from ampfuse.__main__ import main

# The documented command, and what makes it small. O2 is in all of them: the level that this
# library is for.
COMMANDS = {
    "e1": ("cifar --recipe e1 --arm O2", "-b 8 --iterations 2 --repeats 1"),
    "e2": ("cifar --recipe e2 --arm O2", "-b 2 --iterations 1 --image-size 8"),
    "e3-seresnext50": (
        "cifar --recipe e3 --model seresnext50_32x4d --arm O2",
        "-b 4 --iterations 1 --image-size 16",
    ),
    "e3-densenet161": ("cifar --recipe e3 --model densenet161 --arm O2", "-b 4 --iterations 1"),
    "e4-resnet18": ("imagenet --recipe e4 --model resnet18 --arm O2", "-b 4 --iterations 2"),
    "e4-resnet50": ("imagenet --recipe e4 --model resnet50 --arm O2", "-b 2 --iterations 1"),
    "e5-mlp": ("mlp --recipe e5 --arm O2", "-b 16 --iterations 2 --image-size 16"),
    "e5-mnist": ("mnist --recipe e5 --arm O2", "-b 16 --iterations 2"),
}


def run(name: str, data: str, folder: Path, *more: str) -> dict:
    command, small = COMMANDS[name]
    if name.startswith("e4"):
        small += " --image-size 32"
    words = ["train", *command.split(), "--data", data, *small.split(), *more]
    assert main([*words, "-o", str(folder / "results")]) == 0
    (path,) = (folder / "results").rglob("*.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write_cifar(folder / "cifar10")
    write_mnist(folder / "mnist")
    write_imagenet(folder / "imagenet")
    return folder


# Those of E1 and of ResNet-18 run on files, too.
LARGE = dict.fromkeys({*COMMANDS} - {"e5-mlp", "e5-mnist"}, pytest.mark.slow)


@pytest.mark.parametrize("name", [pytest.param(n, marks=LARGE.get(n, ())) for n in COMMANDS])
def test_on_synthetic_data(name, tmp_path):
    result = run(name, "synthetic", tmp_path)
    assert result["recipe"] == name[:2]
    assert (result["conditions"]["data"], result["conditions"]["arm"]) == ("synthetic", "O2")
    assert result["loss_last"] is not None
    assert (result["test_loss"] is None) == (name[:5] in ("e4-re", "e5-ml"))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        pytest.param("e2", "cifar10", marks=pytest.mark.slow),
        pytest.param("e3-densenet161", "cifar10", marks=pytest.mark.slow),
        ("e4-resnet18", "imagenet"),
        ("e5-mlp", "mnist"),
        ("e5-mnist", "mnist"),
    ],
)
def test_on_files_in_the_true_format(name, data, files, tmp_path):
    result = run(name, str(files / data), tmp_path)
    assert result["conditions"]["data"] == result["conditions"]["kind"] == data
    assert result["loss_last"] is not None


@pytest.mark.parametrize(
    "mode", ["FP16", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("FP32", "amp"))]
)
def test_e1_as_it_was_called(mode, files, tmp_path, capsys):
    line = f"train cifar --GPU V100 --mode {mode} --batch_size 8 --iteration 2 --repeats 1"
    assert main([*line.split(), str(files / "cifar10"), "-o", str(tmp_path)]) == 0
    (path,) = (tmp_path / "V100").glob("*.json")
    result = json.loads(path.read_text())
    assert (result["method"], result["batch_size"], result["iterations"]) == (mode, 8, 2)
    assert f"vgg16 {mode} batch 8: " in capsys.readouterr().out


def test_time_against_batch_size_in_one_command(tmp_path, capsys):
    """E1's question: a result for each batch size and arm, as of separate commands; one table."""
    line = "train mlp --data digits --image-size 8 --iterations 2 --batch-size 8 16 --arm fp32 O2"
    assert main([*line.split(), "-o", str(tmp_path)]) == 0
    results = [json.loads(path.read_text()) for path in tmp_path.rglob("*.json")]
    ran = {(result["batch_size"], result["method"]) for result in results}
    assert ran == {(8, "fp32"), (8, "O2"), (16, "fp32"), (16, "O2")}
    printed = capsys.readouterr().out
    assert "batch 8, 16, 2 iterations" in printed
    assert printed.count("mlp O2 batch 16: ") == 1
    assert len(re.findall(r"^\| (fp32|O2) +\| (8|16) ", printed, re.MULTILINE)) == 4
    assert printed.count("O2: ampfuse") == 1


def test_the_original_loop_reads_through_workers(files, tmp_path):
    line = "train cifar --mode FP16 -b 8 --iterations 2 --repeats 1 --loop original"
    assert main([*line.split(), "--data", str(files / "cifar10"), "-o", str(tmp_path)]) == 0
    (path,) = tmp_path.rglob("*.json")
    result = json.loads(path.read_text())
    names = ("loop", "loader", "workers", "channels_last")
    assert [result["conditions"][name] for name in names] == ["original", "workers", 0, False]


def test_a_damaged_image_ends_the_command_in_a_line(tmp_path, capsys):
    write_imagenet(tmp_path / "data", each=8)
    damaged = sorted((tmp_path / "data").rglob("*.png"))[3]
    damaged.write_bytes(damaged.read_bytes()[:60])
    words = ["train", "imagenet", str(tmp_path / "data"), "-b", "4", "--image-size", "32"]
    words += ["--model", "resnet18", "--iterations", "6", "--arm", "O5", "--workers", "1"]
    assert main([*words, "-o", str(tmp_path / "results")]) == 2
    error = capsys.readouterr().err
    assert str(damaged) in error
    assert error.count("\n") == 1
    assert not list(tmp_path.rglob("*.json"))
