"""ImageNet in several processes: copies and shards, and what is resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchvision")
pytest.importorskip("timm")

import data_files
from ampfuse.experiments import cifar, imagenet, settings
from programs import python, ranks, started

IMAGENET = ("-m", "ampfuse.experiments.imagenet")


@pytest.fixture(scope="module")
def line(tmp_path_factory) -> list[object]:
    """Trains on 96 images, tests on 13, which two processes cannot halve."""
    folder = tmp_path_factory.mktemp("imagenet")
    data_files.write_imagenet(folder, each=32, test_each=4)
    extra = folder / "val" / "n01" / "more.png"
    extra.write_bytes((folder / "val" / "n01" / "000.png").read_bytes())
    line = ["--data", folder, "--model", "resnet18", "--image-size", "16", "-b", "8", "-j", "0"]
    line += ["--lr", "0.01", "--evaluate", "--quiet", "--GPU", "here", "--device", "cpu"]
    return [*line, "--no-fuse-batchnorm", "--checkpoints", "--no-channels-last"]


def results_in(folder: Path) -> dict[str, dict]:
    """By method."""
    results = [json.loads(path.read_text()) for path in folder.rglob("*.json")]
    return {result["method"]: result for result in results}


def checkpoint_in(folder: Path) -> Path:
    (path,) = folder.rglob("*.pt")
    return path


def test_rank_0_alone_prints_and_writes(line, tmp_path):
    first, second = ranks(2, *IMAGENET, *line, "--arm", "O2", "--iterations", "4", "-o", tmp_path)
    assert (first.count("images/s, "), second) == (1, "")
    (result,) = results_in(tmp_path).values()
    assert result["conditions"]["world_size"] == 2
    assert result["images_per_s"] == pytest.approx(2 * 8 * 4 / result["time_s"])
    assert result["conditions"]["train_size"] == 96


@pytest.mark.parametrize("arms", [["O2"], pytest.param(settings.LEVELS, marks=pytest.mark.slow)])
def test_shards_leave_the_losses_of_copies(arms, line, tmp_path):
    """The same bits at all levels, where gradients are the same by construction."""
    for folder, more in (("copies", []), ("shards", ["--fsdp"])):
        line = [*line[:], "--arm", *arms, "--iterations", "6"]
        ranks(2, *IMAGENET, *line, *more, "-o", tmp_path / folder)
    copies, shards = (results_in(tmp_path / name) for name in ("copies", "shards"))
    assert copies.keys() == shards.keys() == set(arms)
    for arm, expected in copies.items():
        assert shards[arm]["loss_mean"] == expected["loss_mean"], arm
        assert shards[arm]["test_loss"] == expected["test_loss"], arm
        assert shards[arm]["conditions"]["fsdp"]


@pytest.mark.parametrize("more", [[], ["--fsdp"]], ids=["copies", "shards"])
def test_goes_on_with_the_same_bits(more, line, tmp_path):
    line = [*line, "--arm", "O5", "--optimizer", "adamw", "--lr", "1e-3", *more]
    six = ["--iterations", "6"]
    ranks(2, *IMAGENET, *line, "--iterations", "3", "-o", tmp_path / "short")
    ranks(2, *IMAGENET, *line, *six, "-o", tmp_path / "whole")
    part = ["--resume", checkpoint_in(tmp_path / "short")]
    ranks(2, *IMAGENET, *line, *six, *part, "-o", tmp_path / "resumed")
    names = ("resumed", "whole")
    one, other = (torch.load(checkpoint_in(tmp_path / name), weights_only=True) for name in names)
    del one["optimizer"]["param_groups"], other["optimizer"]["param_groups"]
    for name in ("model", "optimizer", "scaler", "rng"):
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)
    assert one["record"]["losses"] == other["record"]["losses"]
    results = [results_in(tmp_path / name)["O5"] for name in names]
    assert results[0]["test_loss"] == results[1]["test_loss"]


@pytest.mark.parametrize(
    ("processes", "more", "said"),
    [
        (2, ["--fsdp", "--arm", "O2", "--fuse-batchnorm"], "batch norms are gathered apart"),
        (1, ["--fsdp"], "--fsdp: one process has nobody to share with"),
        (1, ["--sync_bn"], "between GPUs only"),
    ],
)
def test_what_does_not_go_together_is_said(processes, more, said, line, tmp_path):
    programs = started(processes, *IMAGENET, *line, *more, "--iterations", "1", "-o", tmp_path)
    for end in [program.wait() for program in programs]:
        assert end.returncode == 2
        assert said in end.stderr.splitlines()[-1]


def test_other_scripts_train_in_one_process(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cifar.main(["--data", "synthetic", "--device", "cpu", "-o", str(tmp_path)]) == 2
    assert "cifar trains in one process" in capsys.readouterr().err
    assert imagenet.SCRIPT.distributed


@pytest.mark.slow
def test_under_torchrun(line, tmp_path):
    """Which ends the others when one process fails; its line says why."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "localhost:0", *IMAGENET, *line, "--arm", "O2"]
    launcher += ["--iterations", "4"]
    end = python(*launcher, "-o", tmp_path)
    assert end.returncode == 0, end.stderr
    assert results_in(tmp_path).keys() == {"O2"}
    failed = python(*launcher, "-b", "500")
    assert failed.returncode == 1
    assert "imagenet: error: --batch-size 500 is more than the 48 training images" in failed.stderr
