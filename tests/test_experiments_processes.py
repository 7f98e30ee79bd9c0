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
from ampfuse.experiments import checkpoint, config
from programs import free_port, python, started

TRAINED = Path(__file__).parent / "trained.py"
LINE = ["--model", "wrn10_1", "--lr", "0.05", "--repeats", "1", "--quiet", "--GPU", "here"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """CIFAR-10's files with 160 images, and 13 to test on, which two processes cannot halve."""
    folder = tmp_path_factory.mktemp("cifar")
    data_files.write_cifar(folder, each=32)
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


@pytest.mark.parametrize(
    "arms",
    [
        ["amp-fp16", "O2"],
        pytest.param(["fp32", "amp-bf16", "O0", "O1", "O3", "O4", "O5"], marks=pytest.mark.slow),
    ],
)
def test_shards_go_the_way_of_copies(arms, images, tmp_path):
    """The same bits at all levels, where gradients are the same by construction; torch's fused
    steps on copies round otherwise than its steps on shards."""
    line = ["cifar", *images, *LINE, "-b", "8", "--iterations", "6", "--no-fuse-batchnorm"]
    line += ["--arm", *arms]
    trained(2, [*line, "-o", tmp_path / "copies"], [*line, "-o", tmp_path / "shards", "--fsdp"])
    copies, shards = (results_in(tmp_path / name) for name in ("copies", "shards"))
    assert copies.keys() == shards.keys() == set(arms)
    for arm, expected in copies.items():
        found = shards[arm]
        assert found["switches"] == {**expected["switches"], "fsdp": True}
        if arm in config.LEVELS:
            assert found["train_loss"] == expected["train_loss"], arm
            assert found["test"]["loss"] == expected["test"]["loss"], arm
        else:
            assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4), arm
            assert found["test"]["loss"] == pytest.approx(expected["test"]["loss"], rel=1e-3), arm


def same_states(path, expected):
    """Of two checkpoints, all but the record of times."""
    one, other = (torch.load(p, weights_only=True) for p in (path, expected))
    for name in ("model", "optimizer", "scaler", "rng"):
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)
    assert one["record"]["losses"] == other["record"]["losses"]


@pytest.fixture(scope="module", params=["O2", pytest.param("amp-fp16", marks=pytest.mark.slow)])
def saved(request, images, tmp_path_factory):
    """A training on shards: line, its checkpoint of 8 steps, and that of all 15."""
    folder = tmp_path_factory.mktemp("whole")
    line = ["cifar", *images, *LINE, "--arm", request.param, "--checkpoints", "--dropout", "0.2"]
    line += ["--no-fuse-batchnorm", "--optimizer", "adamw", "--lr", "1e-3"]
    short, whole = folder / "short", folder / "whole"
    two = [*line, "-b", "8", "--fsdp"]
    trained(2, [*two, "-o", short, "--iterations", "8"], [*two, "-o", whole, "--iterations", "15"])
    (part,), (end,) = (f.rglob("*.pt") for f in (short, whole))
    return line, part, end


def test_goes_on_in_shards_and_copies_with_the_same_bits(saved, tmp_path):
    line, part, whole = saved
    line = [*line, "-b", "8", "--iterations", "15", "--resume", part]
    shards, copies = tmp_path / "shards", tmp_path / "copies"
    trained(2, [*line, "-o", shards, "--fsdp"], [*line, "-o", copies])
    (path,) = shards.rglob("*.pt")
    same_states(path, whole)
    if "O2" in line:
        (path,) = copies.rglob("*.pt")
        same_states(path, whole)
    (log,) = shards.rglob("*.jsonl")
    steps = [json.loads(text)["step"] for text in log.read_text().splitlines()]
    assert steps[-1] == 15
    assert min(steps) > 8  # the log of the first part lies elsewhere


@pytest.mark.parametrize("size", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_goes_on_in_another_number_of_processes(size, saved, tmp_path):
    """Whose batches together are the same; batch norm and dropout see other parts of them."""
    line, part, whole = saved
    line = [*line, "--iterations", "15", "--resume", part, "-o", tmp_path]
    line += ["--fsdp"] * (size > 1)
    refused = run(size, [*line, "-b", "8"])
    assert all(end.returncode == 2 for end in refused)
    said = "".join(end.stderr for end in refused)
    assert said.count("\n") == 1
    assert f"batch_size 8 then and {4 * size} now" in said
    trained(size, [*line, "-b", str(16 // size)])
    (path,) = tmp_path.rglob("*.pt")
    found, expected = (torch.load(p, weights_only=True) for p in (path, whole))
    losses = [values["record"]["losses"] for values in (found, expected)]
    assert losses[0][:8] == losses[1][:8]
    assert losses[0][8:] == pytest.approx(losses[1][8:], abs=0.5)
    assert found["step"] == 15
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
    ("more", "said"),
    [
        (["--arm", "O2", "--fuse-batchnorm"], "at O2 batch norms are gathered apart"),
        (["--compile"], "torch.compile of shards is not supported"),
        (["--arm", "O4", "--model", "wrn11_1"], "the depth is 6n + 4"),
    ],
)
def test_what_does_not_go_with_shards_is_said_once(more, said, images, tmp_path):
    ends = run(2, ["cifar", *images, *LINE, *more, "--fsdp", "--iterations", "1", "-o", tmp_path])
    assert [end.returncode for end in ends] == [2, 2]
    (line,) = "".join(end.stderr for end in ends).splitlines()
    assert said in line


def test_one_process_has_nothing_to_shard(tmp_path):
    line = ["cifar", "--data", "synthetic", "--fsdp", "-o", tmp_path]
    end = python("-m", "ampfuse.experiments.cifar", *line[1:])
    assert end.returncode == 2
    assert "--fsdp: one process has nobody to share with" in end.stderr


def trapped(images, folder, where, rank, *more, step=15):
    """The line of a long training, of 10 steps an epoch, whose process `rank` meets its end."""
    line = ["cifar", f"die {where} {rank} {step}", *images, *LINE, "-b", "8", "--arm", "O2", *more]
    return [*line, "--iterations", "1000", "--checkpoints", "-o", folder]


def checkpoint_in(folder):
    """The path of that of the first epoch."""
    (path,) = folder.rglob("*.pt")
    assert checkpoint.load(path).step == 10
    return path


KILLS = [("forward", 1), ("backward", 0), ("collective", 1), ("saving", 1), ("writing", 0)]
QUICK = [(where, rank, True) for where, rank in KILLS if where not in ("backward", "saving")]
SLOW = [(*kill, fsdp) for kill in KILLS for fsdp in (True, False) if (*kill, fsdp) not in QUICK]


@pytest.mark.parametrize(
    ("where", "rank", "fsdp"),
    [*QUICK, *(pytest.param(*kill, marks=pytest.mark.slow) for kill in SLOW)],
)
def test_the_death_of_one_ends_the_other_in_a_line(where, rank, fsdp, images, tmp_path):
    more = ["--fsdp"] * fsdp
    step = 20 if where in ("saving", "writing") else 15
    ends = run(2, trapped(images, tmp_path, where, rank, *more, step=step))
    path = checkpoint_in(tmp_path)
    assert [ends[rank].returncode, ends[1 - rank].returncode] == [-signal.SIGKILL, 4]
    (line,) = ends[1 - rank].stderr.splitlines()
    assert line.startswith(f"cifar: error: process {1 - rank} of 2: process {rank} ended")
    assert line.endswith(f"To go on, give --resume {path}")
    if (where, fsdp) == ("writing", False):
        line = [*LINE, "-b", "8", "--arm", "O2", "--checkpoints", "-o", tmp_path, *more]
        trained(2, ["cifar", *images, *line, "--iterations", "20", "--resume", path])
        assert checkpoint.load(path).step == 20


@pytest.mark.slow
def test_who_is_silent_is_given_up(images, tmp_path):
    """A stopped process holds its connections: what ends the other is the limit of its wait."""
    line = trapped(images, tmp_path, "silence", 1, "--timeout", "6", step=12)
    plan = json.dumps([[free_port(), *map(str, line)]])
    other, silent = started(2, TRAINED, plan)
    end = other.wait()
    silent.kill()
    assert end.returncode == 4
    (line,) = end.stderr.splitlines()
    assert "process 1 no longer answers. To go on, give --resume " in line
    checkpoint_in(tmp_path)


@pytest.mark.slow
def test_who_hangs_when_another_is_killed_is_ended(images, tmp_path):
    trainer, trap, *line = trapped(images, tmp_path, "forward", 1)
    end, _ = run(2, [trainer, trap, "die sleep 0 15", *line])
    assert end.returncode == 4
    (line,) = end.stderr.splitlines()
    path = checkpoint_in(tmp_path)
    assert line.endswith(
        f"process 1 ended without a word (killed?). To go on, give --resume {path}"
    )


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
    said = "process 0 of 2: process 1 ended without a word (killed?). To go on, give --resume"
    assert ours == [f"cifar: error: {said} {path}"]
    assert "exitcode  : -9" in end.stderr
