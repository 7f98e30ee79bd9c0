"""Each published experiment by its documented command, small: on synthetic data and on files."""

import json
import re
from pathlib import Path

import pytest

from experiment_files import no_checksums as no_checksums
from experiment_files import write_cifar, write_imagenet, write_mnist

pytest.importorskip("torchvision")
pytest.importorskip("timm")
pytest.importorskip("sklearn")

from ampfuse.__main__ import main
from ampfuse.experiments import results

# The documented command and what makes it small, at O2: the level that this library is for.
COMMANDS = {
    "e1": "cifar --recipe e1 -b 8 --iterations 2 --repeats 1",
    "e2": "cifar --recipe e2 -b 2 --iterations 1 --image-size 8",
    "e3-seresnext50": "cifar --recipe e3 -a seresnext50_32x4d -b 4 --iterations 1 --image-size 16",
    "e3-densenet161": "cifar --recipe e3 --model densenet161 -b 4 --iterations 1",
    "e4-resnet18": "imagenet --recipe e4 --model resnet18 -b 4 --iterations 2 --image-size 32",
    "e4-resnet50": "imagenet --recipe e4 --model resnet50 -b 2 --iterations 1 --image-size 32",
    "e5-mlp": "mlp --recipe e5 -b 16 --iterations 2 --image-size 16",
    "e5-mnist": "mnist --recipe e5 -b 16 --iterations 2",
}
ON_FILES = {
    "e2": "cifar10",
    "e3-densenet161": "cifar10",
    "e4-resnet18": "imagenet",
    "e5-mlp": "mnist",
    "e5-mnist": "mnist",
}
RUNS = [*((name, "synthetic") for name in COMMANDS), *ON_FILES.items()]
# E1 runs as it was called, below.
QUICK = [("e4-resnet18", "imagenet"), *(run for run in RUNS if run[0] in ("e5-mlp", "e5-mnist"))]


def result_of(line: str, folder: Path) -> dict:
    assert main(["train", *line.split(), "-o", str(folder)]) == 0
    (path,) = folder.rglob("*.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write_cifar(folder / "cifar10")
    write_mnist(folder / "mnist/MNIST/raw")
    write_imagenet(folder / "imagenet")
    return folder


@pytest.mark.parametrize(
    ("name", "data"),
    [pytest.param(*run, marks=() if run in QUICK else pytest.mark.slow) for run in RUNS],
)
def test_documented_commands(name, data, files, tmp_path):
    source = data if data == "synthetic" else files / data
    result = result_of(f"{COMMANDS[name]} --variant O2 --data {source}", tmp_path)
    assert result["recipe"] == name[:2]
    conditions = result["conditions"]
    assert (conditions["data"], conditions["precision"]) == (data, "O2")
    assert data in ("synthetic", conditions["kind"])
    assert result["loss_last"] is not None
    assert (result["test_loss"] is None) == (name[:5] in ("e4-re", "e5-ml"))


@pytest.mark.parametrize(
    "mode",
    ["FP16", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("FP32", "amp"))],
)
def test_e1_as_it_was_called(mode, files, tmp_path, capsys):
    line = f"cifar --GPU V100 --mode {mode} --batch_size 8 --iteration 2 --repeats 1"
    result = result_of(f"{line} {files / 'cifar10'}", tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "V100"]
    assert (result["variant"], result["batch_size"], result["iterations"]) == (mode, 8, 2)
    assert f"vgg16 {mode} batch 8: " in capsys.readouterr().out
    found = [result["conditions"][name] for name in ("loader", "workers", "channels_last")]
    assert found == ["resident", None, True]


def test_time_against_batch_size_in_one_command(tmp_path, monkeypatch, capsys):
    """E1's question: results of each batch size and variant, as of separate commands; one table.
    They are what results.measured() reads and make_plot draws."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    line = (
        "train mlp --data digits --image-size 8 --iterations 2 --batch-size 8 16 --variant fp32 O2"
    )
    assert main([*line.split(), *"--repeats 2 --device cpu --GPU".split(), "My GPU/1"]) == 0
    printed = capsys.readouterr().out
    assert [printed.count(f"mlp O2 batch 16, {n} of 2: ") for n in (1, 2)] == [1, 1]
    assert len(re.findall(r"^\| (fp32|O2) +\| (8|16) ", printed, re.MULTILINE)) == 4
    assert printed.count("O2: ampfuse") == 1
    assert {path.suffix for path in Path("results").rglob("*.*")} == {".json"}
    rows = results.measured()
    ran = [(row.variant, row.batch_size) for row in rows]
    assert ran == [("fp32", 8), ("fp32", 16), ("O2", 8), ("O2", 16)]
    for row in rows:
        assert (row.n, row.iterations, row.gpu) == (2, 2, "My GPU-1")
        runs = [(run["repeat"], run["seed"], run["recipe"]) for run in row.runs]
        assert runs == [(0, 0, "e5"), (1, 1, "e5")]
        assert {(run["format"], run["memory_kind"]) for run in row.runs} == {(3, "process RSS")}
    assert main(["make_plot"]) == 0
    names = {path.name for path in Path("results/figures").iterdir()}
    assert names == {"MLP - Time.png", "MLP - Memory.png"}
