"""Steps on shards, under FSDP2, DDP and ZeRO, on 2 and 4 processes; see sharded.py."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import sharded
from ampfuse import amp
from programs import ranks
from sharded import CASES, OF_SEVERAL, resume, save_and_go_on


def run(size, folder, *cases):
    """The result of the cases on each of `size` ranks: None, or the error."""
    names = [case.__name__ for case in cases]
    ranks(size, sharded.__file__, folder, *names, timeout=120 * size)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


ONE, TWO = (pytest.param(size, marks=pytest.mark.slow) for size in (1, 2))
FOUR = pytest.param(4, marks=pytest.mark.slow)  # processes, where there may be two cores


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """The results of all cases on two ranks, and the folder of their checkpoints."""
    folder = tmp_path_factory.mktemp("of_two")
    return run(2, folder, *CASES, *OF_SEVERAL, save_and_go_on), folder


@pytest.mark.parametrize("size", [ONE, 2, FOUR])
def test_shards_go_the_way_of_whole_parameters(size, tmp_path, request):
    if size == 2:
        errors_by_rank, _ = request.getfixturevalue("of_two")
    else:
        errors_by_rank = run(size, tmp_path, *(CASES + OF_SEVERAL if size > 1 else CASES))
    for rank, errors in enumerate(errors_by_rank):
        for case, error in errors.items():
            assert error is None, f"{case}, rank {rank} of {size}: {error}"


@pytest.mark.gpu
def test_shards_on_a_gpu(tmp_path, monkeypatch):
    """There is one rank, as two would need two GPUs; test_merge.py has joint decisions."""
    monkeypatch.setenv("DEVICE", "cuda")
    for case, error in run(1, tmp_path, *CASES, save_and_go_on, resume)[0].items():
        assert error is None, f"{case}: {error}"


@pytest.mark.parametrize("size", [1, TWO, FOUR])
def test_checkpoints_resume_on_any_number_of_ranks(size, of_two):
    """Checkpoints of two ranks by torch.distributed.checkpoint resume with equal bits."""
    for rank, errors in enumerate(run(size, of_two[1], resume)):
        assert errors["resume"] is None, f"rank {rank} of {size}: {errors['resume']}"


@pytest.fixture
def alone(tmp_path):
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_batch_norms_among_half_weights_train_in_a_group_of_their_own(level, alone):
    """FSDP itself refuses to put them into one with half weights."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    fully_shard([layers[1]])
    model = fully_shard(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert model(torch.randn(3, 4)).isfinite().all()
