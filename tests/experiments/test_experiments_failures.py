"""A file that cannot be written or read ends a command in one line and status 2."""

import contextlib
import importlib.util
import json
import resource
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("timm")
pytest.importorskip("sklearn")

from ampfuse.__main__ import main
from experiment_files import ResultFolder

TRAIN = "train mlp --data synthetic --image-size 8 -b 8 --variant fp32 --device cpu --iterations 2"
COMMANDS = {  # with the folder that each writes to
    "train": f"{TRAIN} --output {{}}",
    "demo": "demo --levels O0 --epochs 1 --width 2 --device cpu --output {}",
    "make_plot": "make_plot --output {}",
    "make_table": "make_table e1 --csv {}/rows.csv",
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


def refused(capsys, line: str, *said: str) -> str:
    """The command ends in status 2 and a line that says all of `said`. Returns what else it
    printed."""
    capsys.readouterr()
    try:
        status = main(line.split())
    except SystemExit as stop:
        status = stop.code
    assert status == 2
    printed = capsys.readouterr()
    (error,) = printed.err.splitlines()
    assert ": error: " in error
    assert all(part in error for part in said), error
    return printed.out


# By command.
WRONG = {
    "train cifar --device cpu --data digits": {
        "--variant O6": "--variant: invalid choice: 'O6'",
        "--batch-size 0": "must be at least 1, got 0",
        "--prof -1": "must be at least 0, got -1",
        "--lr 0": "expected a positive number, got '0'",
        "--loss-scale big": "--loss-scale: invalid scale value: 'big'",
        "--recipe e4": "invalid choice: 'e4'",
        "--fsdp": "unrecognized arguments: --fsdp",
        "--channels-last maybe": "must be True or False, got 'maybe'",
        "a b": "unrecognized arguments: b",
        "--variant O1 --mode amp": "--mode: not allowed with argument --variant",
        "--mode FP16 --opt-level O2": "--opt-level O2 sets the variant; give no other flag",
        "--fp16": "unrecognized arguments: --fp16",
        "--variant O1 --opt-level O2": "--opt-level O2 sets the variant; give no other flag",
        "--variant tf32": "TF32 needs a GPU of sm_80",
        "--graph": "--graph: a CUDA graph needs a GPU",
        "--loss-scale 2 --static-loss-scale 4": "not allowed with argument --loss-scale",
        "--epochs 1 --iterations 2": "not allowed with argument --epochs",
        "--device gpu": "--device gpu: must be auto, cpu, cuda or cuda:N",
        "--model vgg99": "unknown model 'vgg99': the models are vgg16, wrn28_10, ",
        "--model wrn11_1": "wrn11_1: the depth must be 6n + 4 (10, 16, 22, ...)",
        "--model wrn10_0": "the width at least 1",
    },
    "train cifar --device cpu --data empty": {  # before the data is read
        "--model vgg99": "unknown model 'vgg99'",
    },
    "train imagenet --device cpu": {
        "--variant O2": "--data is required: a folder, digits or",
        "--variant O1 --fp16": "--fp16: not allowed with argument --variant",
        "--mode amp": "unrecognized arguments: --mode",
    },
    "train mnist --device cpu": {
        "--data dgits": "--data dgits: no such folder",
        "x": "--data x",
    },
    "demo": {
        "--levels 02": "invalid choice: '02'",
        "--epochs many": "argument --epochs: invalid",
        "--batch-size 1": "argument --batch-size: must be at least 2, got 1",
        "--batch-size 2000": "--batch-size 2000 is more than the 1437 training images",
        "--width 0": "argument --width: must be at least 1, got 0",
        "--device meta": "--device meta: ampfuse only supports cpu and cuda",
        "--device cuda:99": "--device cuda:99, but",
    },
    "make_plot": {
        "--GPU K80": "--GPU K80: no such results; there are T4",
        "--method O9 FP32": "--variant O9: no such results; there are FP32",
        "--batch 512": "--batch 512: no such results; there are 128",
        "--batch many": "--batch: invalid int value",
        "--epochs 7": "--epochs 7: no such results; there are 6.25",
        "--wrong": "unrecognized arguments: --wrong",
        "--results nowhere": "nowhere: no such folder",
        "--results empty": "empty: no results",
        "--published --GPU T4": "--GPU T4: no such results; there are 1080 Ti, TITAN X",
    },
    "make_table": {
        "": "the following arguments are required: recipe",
        "e6": "invalid choice: 'e6'",
        "e3 --csv old.csv": "results: no results of e3; to measure them: ampfuse train cifar",
        "e3 --no-published": "results: no results of e3; to measure them: ampfuse train",
        "e1 --results empty --csv old.csv": "empty: no results of e1; to measure",
        "e1 --csv empty": "empty",
        "e1 --GPU V100": "--GPU V100: no such results; there are T4",
    },
}


@pytest.mark.parametrize(
    ("command", "options"),
    [(command, options) for command, lines in WRONG.items() for options in lines],
)
def test_wrong_use_is_one_line_and_changes_nothing(command, options, capsys):
    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}

    Path("empty").mkdir()
    for old in (Path("results/figures/CIFAR - Time.png"), Path("old.csv")):
        old.parent.mkdir(exist_ok=True)
        old.write_text("old")
    before = content()
    printed = refused(capsys, f"{command} {options}", WRONG[command][options])
    assert content() == before
    assert printed == "" or "make_" not in command


def test_without_the_extra_one_line_names_it(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for line, packages, extra in (
        ("train cifar --data digits", "timm, tqdm, scikit-learn", "experiments"),
        ("make_plot", "matplotlib", "experiments"),
        ("demo", "scikit-learn, matplotlib, tqdm", "demo"),
    ):
        refused(capsys, line, f"{packages} not installed: pip install 'ampfuse[{extra}]'")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_takes_no_files(name, capsys):
    for folder, said in (
        ("file", "file is not a folder"),
        ("file/below", "file is not a folder"),
        ("/proc/none", "cannot write to /proc (No such file or directory)"),
        ("x" * 300, "File name too long"),
    ):
        refused(capsys, COMMANDS[name].format(folder), said)


@pytest.mark.parametrize(
    ("name", "more", "size", "said"),
    [
        ("train", "", 1000, ".json'"),
        ("train", " --checkpoints", 1000, ".pt'"),
        ("train", " --checkpoints", 10000, ".pt'"),
        ("demo", "", 10, ": 'new/levels.csv'"),
        ("demo", "", 10000, ": 'new/Digits - Time.png'"),
        ("make_plot", "", 10000, ": 'new/CIFAR - Time.png'"),
        ("make_table", "", 10, ": 'new/rows.csv'"),
    ],
)
def test_a_disk_that_becomes_full(name, more, size, said, capsys):
    Path("new").mkdir()
    old = {Path("new", path) for path in ("CIFAR - Memory.png", "CIFAR - Time.png", "rows.csv")}
    for path in old:
        path.write_text("old")
    with largest_file(size):
        refused(capsys, COMMANDS[name].format("new") + more, "File too large: ", said)
    there = {path for path in Path("new").rglob("*") if path.is_file()}
    assert there - old <= {Path("new/levels.csv")}
    assert {path.read_text() for path in old} == {"old"}


def test_a_folder_that_can_be_written_in_one_that_cannot():
    """A volume in the root of a container is one."""
    assert main(COMMANDS["demo"].format("/proc/self/cwd").split()) == 0
    assert Path("levels.csv").is_file()


@pytest.fixture
def saved() -> Path:
    """A checkpoint of two steps."""
    assert main(f"{TRAIN} --output saved --GPU here --checkpoints".split()) == 0
    (path,) = Path("saved").rglob("*.pt")
    return path


def test_a_checkpoint_survives_the_one_that_could_not_be_written(saved, capsys):
    before = saved.read_bytes()
    longer = f"{TRAIN} --iterations 4 --output saved --GPU here --checkpoints --resume {saved}"
    with largest_file(len(before) // 2):
        refused(capsys, longer, f"File too large: '{saved}'")
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.glob(".*")] == []
    assert main(longer.split()) == 0
    (result,) = saved.parent.glob("*.json")
    assert json.loads(result.read_text())["iterations"] == 4


def changed(part: str, **values):
    """A change of one part of a checkpoint."""
    return lambda whole: {**whole, part: {**whole[part], **values}}


DAMAGED = "other.pt is damaged or not a checkpoint of this version"
CHANGES = [
    *((share, DAMAGED) for share in (0.0, 0.001, 0.5, 0.999)),  # cut off
    (lambda whole: {"state_dict": {}}, DAMAGED),
    (lambda whole: [1, 2], DAMAGED),
    (lambda whole: torch.nn.Linear(2, 2), DAMAGED),  # is not plain data
    (lambda whole: {**whole, "format": 1}, DAMAGED),
    (changed("record", new=1), DAMAGED),
    (changed("settings", model="vgg16", lr=0.5), "is of other settings: model vgg16, lr 0.5"),
    (lambda whole: {**whole, "rng": 2 * whole["rng"]}, "is of 2 processes, not 1"),
]


def test_a_checkpoint_that_is_damaged_or_of_another_run(saved, capsys):
    whole = torch.load(saved, weights_only=True)
    for change, said in CHANGES:
        if callable(change):
            torch.save(change(whole), "other.pt")
        else:
            content = saved.read_bytes()
            Path("other.pt").write_bytes(content[: int(len(content) * change)])
        refused(capsys, f"{TRAIN} --resume other.pt", "--resume: ", said)
    for path in ("missing.pt", ".", "file/below", "x" * 300):
        refused(capsys, f"{TRAIN} --resume {path}", f"--resume '{path}': ")
