"""Steps on shards, under FSDP2, DDP and ZeRO, on 2 and 4 processes; see sharded.py."""

from pathlib import Path

import pytest
import torch

from programs import ranks

HERE = Path(__file__).parent
CASES = (
    "every_optimizer",
    "groups_and_frozen_parameters",
    "gradients_of_other_kinds",
    "every_place",
    "every_mode",
    "clipping",
    "fsdp",
    "levels",
    "a_step_of_its_own",
    "ddp",
    "accumulation_in_fsdp",
    "zero_redundancy",
)
OF_SEVERAL = ("no_sync", "static_graph_and_join", "collectives")


def run(size, folder, *names):
    """What each rank of `size` says of the cases: None, or what went wrong."""
    ranks(size, HERE / "sharded.py", folder, *names, timeout=120 * size)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


ONE = pytest.param(1, marks=pytest.mark.slow)
FOUR = pytest.param(4, marks=pytest.mark.slow)  # processes, where there may be two cores


@pytest.mark.parametrize("size", [ONE, 2, FOUR])
def test_shards_go_the_way_of_whole_parameters(size, tmp_path):
    cases = CASES + OF_SEVERAL if size > 1 else CASES
    for rank, errors in enumerate(run(size, tmp_path, *cases)):
        for case, error in errors.items():
            assert error is None, f"{case}, rank {rank} of {size}: {error}"


@pytest.mark.gpu
def test_shards_on_a_gpu(tmp_path, monkeypatch):
    """One rank: two would need two GPUs. What ranks decide together: test_merge.py."""
    monkeypatch.setenv("DEVICE", "cuda")
    for case, error in run(1, tmp_path, *CASES, "save_and_go_on", "resume")[0].items():
        assert error is None, f"{case}: {error}"


@pytest.mark.parametrize("size", [1, FOUR])
def test_checkpoints_resume_on_another_number_of_ranks(size, tmp_path):
    """With torch.distributed.checkpoint, in every mode: equal bits."""
    for ranks_, job in ((2, "save_and_go_on"), (2, "resume"), (size, "resume")):
        for rank, errors in enumerate(run(ranks_, tmp_path, job)):
            assert errors[job] is None, f"rank {rank} of {ranks_}: {errors[job]}"
