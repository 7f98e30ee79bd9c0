"""What cannot be written or read ends a command in one line and status 2, and spoils no file."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import resource
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("timm")
pytest.importorskip("sklearn")

import data_files
from ampfuse.__main__ import main
from experiment_results import ResultFolder

TRAIN = "train mlp --data synthetic --image-size 8 -b 8 --arm fp32 --device cpu --quiet".split()
SHORT = ["--iterations", "2"]
DEMO = "demo --levels O0 --epochs 1 --width 2 --device cpu".split()
# Each with the option that says where it writes.
COMMANDS = {
    "train": ([*TRAIN, *SHORT, "--output"], ""),
    "demo": ([*DEMO, "--output"], ""),
    "make_plot": (["make_plot", "--output"], ""),
    "make_table": (["make_table", "e1", "--csv"], "/rows.csv"),
}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    ResultFolder(Path("results")).add()


@contextlib.contextmanager
def largest_file(size: int):
    """Files grow to `size` bytes at most: what a full disk does, by another errno."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def refused(capsys, argv: list[str], *said: str) -> None:
    """The command line ends in status 2 and a line that says all of `said`."""
    capsys.readouterr()
    try:
        status = main(argv)
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert ": error: " in line
    assert all(part in line for part in said), line


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "train cifar --data digits",
            "torchvision, timm, tqdm, scikit-learn missing: {}experiments]'",
        ),
        ("train cifar --data synthetic", "torchvision, timm, tqdm missing: {}experiments]'"),
        ("make_plot", "matplotlib missing: {}experiments]'"),
        ("demo", "scikit-learn, matplotlib, tqdm missing: {}demo]'"),
    ],
)
def test_without_the_extra_one_line_names_it(line, said, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(line.split()) == 1
    error = capsys.readouterr().err
    assert said.format("pip install 'ampfuse[") in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("file", "file is not a folder"),
        ("file/below", "file is not a folder"),
        ("/proc/none", "/proc takes no files (No such file or directory)"),
        ("x" * 300, "File name too long"),
    ],
    ids=["file", "below a file", "proc", "long name"],
)
def test_a_folder_that_takes_no_files(name, folder, said, capsys):
    argv, within = COMMANDS[name]
    refused(capsys, [*argv, folder + within], said)


@pytest.mark.parametrize(
    ("name", "more", "size", "said"),
    [
        ("train", [], 1000, ".json'"),
        ("train", ["--checkpoints"], 1000, ".pt'"),
        ("train", ["--checkpoints"], 10000, ".pt'"),
        ("demo", [], 10, ": 'new/levels.csv'"),
        ("demo", [], 10000, ": 'new/Digits - Time.png'"),
        ("make_plot", [], 10000, ": 'new/CIFAR - Time.png'"),
        ("make_table", [], 10, ": 'new/rows.csv'"),
    ],
)
def test_a_disk_that_becomes_full(name, more, size, said, capsys):
    argv, within = COMMANDS[name]
    Path("new").mkdir()
    old = {Path("new", path) for path in ("CIFAR - Memory.png", "CIFAR - Time.png", "rows.csv")}
    for path in old:
        path.write_text("old")
    with largest_file(size):
        refused(capsys, [*argv, "new" + within, *more], "File too large: ", said)
    there = {path for path in Path("new").rglob("*") if path.is_file()}
    assert there - old <= {Path("new/levels.csv")}
    assert {path.read_text() for path in old} == {"old"}


def test_a_folder_that_can_be_written_in_one_that_cannot():
    """As a volume in the root of a container."""
    assert main([*DEMO, "--no-plots", "--output", "/proc/self/cwd"]) == 0
    assert Path("levels.csv").is_file()


@pytest.fixture
def saved() -> Path:
    """A checkpoint of two steps."""
    assert main([*TRAIN, *SHORT, "--output", "saved", "--checkpoints"]) == 0
    (path,) = Path("saved").rglob("*.pt")
    return path


def test_a_checkpoint_survives_the_one_that_could_not_be_written(saved, capsys):
    before = saved.read_bytes()
    longer = [*TRAIN, "--iterations", "4", "--output", "saved", "--checkpoints"]
    with largest_file(len(before) // 2):
        refused(
            capsys,
            [*longer, "--resume", str(saved)],
            f"File too large: '{saved}'",
        )
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.glob(".*")] == []
    assert main([*longer, "--resume", str(saved)]) == 0


def changed(part: str, **values):
    """A change of one part of a checkpoint."""
    return lambda whole: {**whole, part: {**whole[part], **values}}


DAMAGED = "other.pt is damaged, or no checkpoint of this version"


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_checkpoint_that_was_cut_off(share, saved, capsys):
    Path("other.pt").write_bytes(saved.read_bytes()[: int(saved.stat().st_size * share)])
    refused(capsys, [*TRAIN, *SHORT, "--resume", "other.pt"], DAMAGED)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda whole: {"state_dict": {}}, DAMAGED),
        (lambda whole: [1, 2], DAMAGED),
        (lambda whole: torch.nn.Linear(2, 2), DAMAGED),  # not of plain data
        (lambda whole: {**whole, "format": 1}, DAMAGED),
        (changed("record", new=1), DAMAGED),
        (changed("settings", model="vgg16"), "another run (model 'vgg16' then and 'mlp' now)"),
        (changed("model", **{"1.weight": torch.zeros(2)}), "1.weight"),
        (changed("model", more=torch.zeros(2)), '"more"'),
        (lambda whole: {**whole, "model": {}}, '"1.weight"'),
    ],
)
def test_a_checkpoint_of_something_else(change, said, saved, capsys):
    whole = torch.load(saved, weights_only=True)
    torch.save(change(copy.copy(whole)), "other.pt")
    refused(capsys, [*TRAIN, *SHORT, "--resume", "other.pt"], "--resume: ", said)


@pytest.mark.parametrize("path", [".", "file/below", "x" * 300])
def test_a_checkpoint_that_is_no_file(path, capsys):
    refused(capsys, [*TRAIN, *SHORT, "--resume", path], f"'{path}'")


def test_a_label_that_is_no_class(capsys):
    data_files.write_mnist(Path("mnist"))
    path = Path("mnist/train-labels-idx1-ubyte")
    path.write_bytes(path.read_bytes()[:-1] + b"\xc8")
    argv = "train mnist --data mnist -b 8 --iterations 1 --arm fp32 --device cpu".split()
    refused(capsys, argv, f"{path} is damaged (the label of image 39 is 200, not 0 to 9)")
