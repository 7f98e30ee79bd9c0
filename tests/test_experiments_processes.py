"""The trainers in several processes: copies and shards, other numbers of them, and their end."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("timm")

import data_files
from ampfuse.experiments import checkpoint, config, trainers
from programs import free_port, python, started

TRAINED = Path(__file__).parent / "trained.py"
LINE = ["--model", "wrn10_1", "--lr", "0.05", "--repeats", "1", "--quiet", "--GPU", "here"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """CIFAR-10's files with 80 images, and 13 to test on, which two processes cannot halve."""
    folder = tmp_path_factory.mktemp("cifar")
    data_files.write_cifar(folder, each=16)
    return ["--data", folder]


def run(size, *lines):
    """What `size` processes say that train by these command lines: status, output, errors."""
    plan = json.dumps([[free_port(), *map(str, line)] for line in lines])
    programs = started(size, TRAINED, plan)
    return [program.wait() for program in programs]


def trained(size, *lines):
    for end in run(size, *lines):
        assert end.returncode == 0, end.stderr


def results_in(folder):
    """By arm."""
    results = [json.loads(path.read_text()) for path in folder.rglob("*.json")]
    return {result["arm"]: result for result in results}


def same_states(path, expected):
    """Of two checkpoints, all but the record of times."""
    one, other = (torch.load(p, weights_only=True) for p in (path, expected))
    for name in ("model", "optimizer", "scaler", "rng"):
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)
    assert one["record"]["losses"] == other["record"]["losses"]


@pytest.fixture(scope="module")
def saved(images, tmp_path_factory):
    """A training of 6 steps in copies, and one of 3 in shards that went on in shards and in copies:
    its line, and its folders."""
    folder = tmp_path_factory.mktemp("saved")
    line = ["cifar", *images, *LINE, "--arm", "O2", "--checkpoints", "--dropout", "0.2"]
    line += ["--no-fuse-batchnorm", "--optimizer", "adamw", "--lr", "1e-3"]
    names = ("copies", "short", "shards", "copied")
    copies, short, shards, copied = ([*line, "-b", "8", "-o", folder / n] for n in names)
    whole, part = ["--iterations", "6"], ["--resume", folder / "short" / "**" / "*.pt"]
    trained(
        2,
        [*copies, *whole],
        [*short, "--fsdp", "--iterations", "3"],
        [*shards, *whole, *part, "--fsdp"],
        [*copied, *whole, *part],
    )
    return line, {name: folder / name for name in names}


def checkpoint_of(folder):
    (path,) = folder.rglob("*.pt")
    return path


def test_shards_and_what_goes_on_leave_the_bits_of_copies(saved):
    _, folders = saved
    expected = checkpoint_of(folders["copies"])
    for name in ("shards", "copied"):
        same_states(checkpoint_of(folders[name]), expected)
    (copies,), (shards,) = (results_in(folders[name]).values() for name in ("copies", "shards"))
    assert shards["switches"] == {**copies["switches"], "fsdp": True}
    assert shards["test"]["loss"] == copies["test"]["loss"]
    (log,) = folders["shards"].rglob("*.jsonl")
    steps = [json.loads(text)["step"] for text in log.read_text().splitlines()]
    assert steps[-1] == 6
    assert min(steps) > 3  # the log of the first part lies elsewhere


@pytest.mark.slow
def test_shards_go_the_way_of_copies_in_every_arm(images, tmp_path):
    """The same bits at all levels, where gradients are the same by construction; torch's fused
    steps on copies round otherwise than its steps on shards."""
    arms = ["fp32", "amp-fp16", "amp-bf16", *config.LEVELS]
    line = ["cifar", *images, *LINE, "-b", "8", "--iterations", "6", "--no-fuse-batchnorm"]
    line += ["--arm", *arms]
    trained(2, [*line, "-o", tmp_path / "copies"], [*line, "-o", tmp_path / "shards", "--fsdp"])
    copies, shards = (results_in(tmp_path / name) for name in ("copies", "shards"))
    assert copies.keys() == shards.keys() == set(arms)
    for arm, expected in copies.items():
        found = shards[arm]
        if arm in config.LEVELS:
            assert found["train_loss"] == expected["train_loss"], arm
            assert found["test"]["loss"] == expected["test"]["loss"], arm
        else:
            assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4), arm
            assert found["test"]["loss"] == pytest.approx(expected["test"]["loss"], rel=1e-3), arm


@pytest.mark.slow
def test_torchs_arm_goes_on_in_shards_with_the_same_bits(images, tmp_path):
    line = ["cifar", *images, *LINE, "--arm", "amp-fp16", "--checkpoints", "--dropout", "0.2"]
    line += ["--optimizer", "adamw", "-b", "8", "--fsdp"]
    part, six = tmp_path / "short" / "**" / "*.pt", ["--iterations", "6"]
    trained(
        2,
        [*line, "-o", tmp_path / "short", "--iterations", "3"],
        [*line, "-o", tmp_path / "whole", *six],
        [*line, "-o", tmp_path / "resumed", *six, "--resume", part],
    )
    same_states(*(checkpoint_of(tmp_path / name) for name in ("resumed", "whole")))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4])
def test_goes_on_in_another_number_of_processes(size, saved, tmp_path):
    """Whose batches together are the same; batch norm and dropout see other parts of them."""
    line, folders = saved
    line = [*line, "--iterations", "6", "--resume", checkpoint_of(folders["short"]), "-o", tmp_path]
    line += ["--fsdp"] * (size > 1)
    for end in run(size, [*line, "-b", "8"]):
        assert end.returncode == 2
        (said,) = end.stderr.splitlines()
        assert f"batch_size 8 then and {4 * size} now" in said
    trained(size, [*line, "-b", str(16 // size)])
    paths = checkpoint_of(tmp_path), checkpoint_of(folders["copies"])
    found, expected = (torch.load(path, weights_only=True) for path in paths)
    losses = [values["record"]["losses"] for values in (found, expected)]
    assert losses[0][:3] == losses[1][:3]
    assert losses[0][3:] == pytest.approx(losses[1][3:], abs=0.5)
    assert found["step"] == 6
    assert found["world_size"] == size


@pytest.mark.slow
def test_imagenet_in_shards(tmp_path):
    data_files.write_imagenet(tmp_path / "data", each=8)
    line = ["imagenet", "--data", tmp_path / "data", "--image-size", "32", "-b", "4", "--arm", "O5"]
    line += ["--iterations", "3", "-j", "0", "--evaluate", *LINE[2:], "--fsdp", "--lr", "1e-4"]
    trained(2, [*line, "--model", "resnet18", "-o", tmp_path / "results"])
    (result,) = results_in(tmp_path / "results").values()
    assert result["test"]["loss"] < 20


@pytest.mark.parametrize(
    ("processes", "more", "said"),
    [
        (2, ["--arm", "O2", "--fuse-batchnorm"], "at O2 batch norms are gathered apart"),
        (2, ["--compile"], "torch.compile of shards is not supported"),
        (1, [], "--fsdp: one process has nobody to share with"),
    ],
)
def test_what_does_not_go_with_shards_is_said_before_the_others_come(
    processes, more, said, monkeypatch, capfd, tmp_path
):
    monkeypatch.setenv("RANK", str(processes - 1))
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    line = ["--data", "synthetic", "--fsdp", *more, "--device", "cpu", "-o", str(tmp_path)]
    assert trainers.main("cifar", line) == 2
    (error,) = capfd.readouterr().err.splitlines()
    assert said in error


@pytest.mark.slow
def test_what_is_wrong_with_the_model_is_said_once(images, tmp_path):
    line = ["cifar", *images, *LINE[2:], "--model", "wrn11_1", "-b", "8", "--iterations", "1"]
    ends = run(2, [*line, "-o", tmp_path])
    assert [end.returncode for end in ends] == [2, 2]
    (said,) = "".join(end.stderr for end in ends).splitlines()
    assert "the depth is 6n + 4" in said


def trapped(images, folder, where, rank, *more, step=7):
    """The line of a long training, of 5 steps an epoch, whose process `rank` meets its end."""
    line = ["cifar", f"die {where} {rank} {step}", *images, *LINE, "-b", "8", "--arm", "O2", *more]
    return [*line, "--iterations", "1000", "--checkpoints", "-o", folder]


def checkpoint_in(folder):
    """The path of that of the first epoch."""
    (path,) = folder.rglob("*.pt")
    assert checkpoint.load(path).step == 5
    return path


KILLS = [("forward", 1), ("backward", 0), ("collective", 1), ("saving", 1), ("writing", 0)]
SLOW = [(*kill, fsdp) for kill in KILLS for fsdp in (True, False)]
SLOW.remove(QUICK := ("forward", 1, True))


@pytest.mark.parametrize(
    ("where", "rank", "fsdp"), [QUICK, *(pytest.param(*k, marks=pytest.mark.slow) for k in SLOW)]
)
def test_the_death_of_one_ends_the_other_in_a_line(where, rank, fsdp, images, tmp_path):
    more = ["--fsdp"] * fsdp
    ends = run(2, trapped(images, tmp_path, where, rank, *more))
    path = checkpoint_in(tmp_path)
    assert [ends[rank].returncode, ends[1 - rank].returncode] == [-signal.SIGKILL, 4]
    *of_torch, line = ends[1 - rank].stderr.splitlines()
    assert not of_torch or rank == 0  # which had the store
    assert f"cifar: error: process {1 - rank} of 2: process {rank} no longer answers" in line
    assert line.endswith(f"To go on, give --resume {path}")
    if (where, fsdp) == ("writing", False):
        line = [*LINE, "-b", "8", "--arm", "O2", "--checkpoints", "-o", tmp_path, *more]
        trained(2, ["cifar", *images, *line, "--iterations", "8", "--resume", path])
        assert checkpoint.load(path).step == 8


@pytest.mark.slow
def test_who_is_silent_is_given_up(images, tmp_path):
    """A stopped process holds its connections: what ends the other is the limit of its wait."""
    line = trapped(images, tmp_path, "silence", 1, "--timeout", "6")
    plan = json.dumps([[free_port(), *map(str, line)]])
    other, silent = started(2, TRAINED, plan)
    end = other.wait()
    silent.kill()
    assert end.returncode == 4
    (line,) = end.stderr.splitlines()
    assert "process 1 no longer answers (killed?). To go on, give --resume " in line
    checkpoint_in(tmp_path)


@pytest.mark.slow
def test_who_hangs_when_another_is_killed_is_ended(images, tmp_path):
    trainer, trap, *line = trapped(images, tmp_path, "forward", 1)
    end, _ = run(2, [trainer, trap, "die sleep 0 7", *line])
    assert end.returncode == 4
    (line,) = end.stderr.splitlines()
    path = checkpoint_in(tmp_path)
    assert line.endswith(f"process 1 no longer answers (killed?). To go on, give --resume {path}")


@pytest.mark.slow
def test_an_error_in_one_ends_all_with_its_line(images, tmp_path):
    other, failed = run(2, trapped(images, tmp_path, "error", 1, "--fsdp"))
    path = checkpoint_in(tmp_path)
    assert [failed.returncode, other.returncode] == [1, 4]
    report = tmp_path / "here" / "cifar-process1-error.txt"
    said = f"OSError: the disk is gone (see {report}). To go on, give --resume {path}\n"
    assert failed.stderr == f"cifar: error: process 1 of 2: {said}"
    assert "in fails" in report.read_text()
    said = f"process 1 ended: OSError: the disk is gone. To go on, give --resume {path}\n"
    assert other.stderr == f"cifar: error: process 0 of 2: {said}"


@pytest.mark.slow
def test_a_file_that_one_cannot_read_ends_all(tmp_path):
    data_files.write_imagenet(tmp_path / "data", each=8, kind="jpg")
    damaged = tmp_path / "data" / "train" / "n02" / "010.jpg"
    damaged.write_bytes(damaged.read_bytes()[:300])
    line = ["imagenet", "--data", tmp_path / "data", "--image-size", "32", "-b", "4", "-j", "0"]
    line += ["--arm", "O5", "--epochs", "2", *LINE[2:], "--model", "resnet18", "-o", tmp_path]
    ends = run(2, line)
    assert sorted(end.returncode for end in ends) == [2, 4]
    for end in ends:
        (said,) = end.stderr.splitlines()
        assert f"{damaged}: cannot be read as an image" in said


@pytest.mark.slow
def test_under_torchrun(images, tmp_path):
    """Its agent ends the others too; our line stands before its report."""
    line = trapped(images, tmp_path, "forward", 1, "--fsdp")
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    port = command[-1]
    end = python(*command, TRAINED, json.dumps([[port, *map(str, line)]]), OMP_NUM_THREADS="1")
    path = checkpoint_in(tmp_path)
    assert end.returncode == 1
    ours = [said for said in end.stderr.splitlines() if said.startswith("cifar: error: ")]
    said = "process 0 of 2: process 1 no longer answers (killed?). To go on, give --resume"
    assert ours == [f"cifar: error: {said} {path}"]
    assert "exitcode  : -9" in end.stderr
