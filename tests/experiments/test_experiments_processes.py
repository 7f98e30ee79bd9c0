"""ImageNet in several processes: copies and shards, and what is resumed."""

import contextlib
import json
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

pytest.importorskip("torchvision")
pytest.importorskip("timm")

import experiment_files
from ampfuse.experiments import cifar, imagenet, settings
from ampfuse.experiments.distributed import World, gathered
from programs import python, ranks

# Runs command lines, one after another, in one process group: imports and garbage collections take
# seconds. "*" is the checkpoint there. The network has half its blocks and an eighth of its width.
SEVERAL = """
import gc, glob, json, sys
import torch, torchvision
import torch._dynamo, torch.distributed.fsdp, timm
import torch.distributed as dist
from ampfuse.experiments import imagenet
from torchvision.models import resnet

class Narrow(resnet.ResNet):
    def _make_layer(self, block, planes, *arguments, **options):
        return super()._make_layer(block, planes // 8, *arguments, **options)

def narrow(num_classes):
    model = Narrow(resnet.BasicBlock, [1, 1, 1, 1], num_classes)
    model.fc = torch.nn.Linear(64, num_classes)
    return model

torchvision.models.resnet18 = narrow
begin, end = dist.init_process_group, dist.destroy_process_group
dist.init_process_group = lambda *backend: dist.is_initialized() or begin(*backend)
dist.destroy_process_group = lambda: None
gc.freeze()
for line, status in json.loads(sys.argv[1]):
    words = [glob.glob(word)[0] if "*" in word else word for word in line.split()]
    assert imagenet.main(words) == status, line
    dist.barrier()  # rank 0 has written what it writes
end()
"""


@pytest.fixture(scope="module")
def line(tmp_path_factory) -> str:
    """Trains on 96 images and tests on 13, an odd number for two processes."""
    folder = tmp_path_factory.mktemp("imagenet")
    experiment_files.write_imagenet(folder, each=32, test_each=4)
    extra = folder / "val" / "n01" / "more.png"
    extra.write_bytes((folder / "val" / "n01" / "000.png").read_bytes())
    line = f"--data {folder} --model resnet18 --image-size 16 -b 8 -j 0 --lr 1e-3 --evaluate True"
    line += " --optimizer adamw --GPU here --device cpu --fuse False --channels-last False"
    return f"{line} --checkpoints"


class Trained(NamedTuple):
    """The files and output that two processes left."""

    folder: Path
    printed: list[str]  # by rank
    errors: list[str]

    def results(self, name: str) -> dict[str, dict]:
        """By variant."""
        found = [json.loads(path.read_text()) for path in (self.folder / name).rglob("*.json")]
        return {result["variant"]: result for result in found}

    def checkpoint(self, name: str, variant: str) -> dict:
        (path,) = (self.folder / name).rglob(f"*-{variant}-*.pt")
        return torch.load(path, weights_only=True)


def run_by_two(lines: list[tuple[str, int]], folder: Path) -> Trained:
    """Run `lines`, each with its expected exit status."""
    ends = ranks(2, "-c", SEVERAL, json.dumps(lines))
    return Trained(folder, [end.stdout for end in ends], [end.stderr for end in ends])


@pytest.fixture(scope="module")
def trained(line, tmp_path_factory) -> Trained:
    folder, lines = tmp_path_factory.mktemp("trained"), []
    for at, more in ((folder / "copies", ""), (folder / "shards", " --fsdp")):
        six = f"{line}{more} --iterations 6"
        lines += [
            (f"{six} --variant O2 O5 -o {at}", 0),
            (f"{line}{more} --iterations 3 --variant O5 -o {at}-short", 0),
            (f"{six} --variant O5 --resume {at}-short/here/*.pt -o {at}-resumed", 0),
        ]
    # Before O0 is trained, whose line test_rank_0_alone_prints_and_writes() would count.
    lines += [(f"{line} --fsdp --fuse --variant O0 O2 --iterations 1", 2)]
    lines += [(f"{line} --fsdp --model vgg16 --iterations 1", 2)]
    return run_by_two(lines, folder)


def test_rank_0_alone_prints_and_writes(trained):
    first, second = trained.printed
    assert (first.count("images/s, "), second) == (8, "")
    results = trained.results("copies")
    assert results.keys() == {"O2", "O5"}
    for result in results.values():
        assert result["conditions"]["world_size"] == 2
        assert result["images_per_s"] == pytest.approx(2 * 8 * 6 / result["time_s"])
        assert result["conditions"]["train_size"] == 96


def assert_same_losses(trained: Trained, variants: set[str]) -> None:
    copies, shards = trained.results("copies"), trained.results("shards")
    assert copies.keys() == shards.keys() == variants
    for variant, expected in copies.items():
        assert shards[variant]["loss_mean"] == expected["loss_mean"], variant
        assert shards[variant]["test_loss"] == expected["test_loss"], variant
        assert shards[variant]["conditions"]["fsdp"]


def test_shards_leave_the_losses_of_copies(trained):
    """The same bits, where gradients are the same by construction."""
    assert_same_losses(trained, {"O2", "O5"})


@pytest.mark.slow
def test_shards_leave_the_losses_of_copies_at_all_levels(line, tmp_path):
    line += f" --variant {' '.join(settings.LEVELS)} --iterations 6 -o {tmp_path}/"
    lines = [(f"{line}copies", 0), (f"{line}shards --fsdp", 0)]
    assert_same_losses(run_by_two(lines, tmp_path), set(settings.LEVELS))


@pytest.mark.parametrize("way", ["copies", "shards"])
def test_goes_on_with_the_same_bits(way, trained):
    one, other = (trained.checkpoint(name, "O5") for name in (f"{way}-resumed", way))
    del one["optimizer"]["param_groups"], other["optimizer"]["param_groups"]
    for name in ("model", "optimizer", "scaler", "rng"):
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)
    assert one["record"]["losses"] == other["record"]["losses"]
    results = [trained.results(name)["O5"] for name in (f"{way}-resumed", way)]
    assert results[0]["test_loss"] == results[1]["test_loss"]


def test_what_does_not_go_together_is_said(trained, line, tmp_path, capsys):
    for error in trained.errors:
        assert "imagenet: error: --fsdp --fuse: batch norms among half weights are sharded" in error
        assert "imagenet: error: --fsdp: only ResNets can be sharded, not vgg16" in error
    for flag, said in (("--fsdp", "needs several processes"), ("--sync_bn", "only between GPUs")):
        assert imagenet.main(f"{line} {flag} --iterations 1 -o {tmp_path}".split()) == 2
        assert flag in (error := capsys.readouterr().err)
        assert said in error


def test_other_scripts_train_in_one_process(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cifar.main(["--data", "synthetic", "--device", "cpu", "-o", str(tmp_path)]) == 2
    assert "cifar trains in one process" in capsys.readouterr().err


@pytest.mark.parametrize("error", [None, KeyError("in the block")])
def test_an_exception_ends_the_group_and_shards_the_model_again(error, monkeypatch):
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    monkeypatch.setattr(dist, "init_process_group", partial(dist.init_process_group, **alone))
    caught = pytest.raises(KeyError) if error else contextlib.nullcontext()
    with caught, World(size=2).connected(torch.device("cpu")):
        model = fully_shard(nn.Linear(4, 4))
        with gathered(model):
            assert not isinstance(model.weight, DTensor)
            if error:
                raise error
    assert isinstance(model.weight, DTensor)
    assert not dist.is_initialized()


@pytest.mark.slow
def test_under_torchrun(line, tmp_path):
    """It ends all processes when one fails, whose line says why."""
    launcher = "-m torch.distributed.run --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint"
    launcher += " localhost:0 -m ampfuse.experiments.imagenet"
    words = f"{launcher} {line} --variant O2 --iterations 4".split()
    end = python(*words, "-o", tmp_path)
    assert end.returncode == 0, end.stderr
    assert {path.suffix for path in tmp_path.rglob("*.*")} == {".json", ".pt"}
    failed = python(*words, "-b", "500")
    assert failed.returncode == 1
    assert "imagenet: error: --batch-size 500 is more than the 48 training images" in failed.stderr
