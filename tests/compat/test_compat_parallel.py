"""``apex.parallel`` in two processes with gloo, and alone."""

import pytest
import torch
from torch import nn

import ampfuse.compat.apex as apex
from ampfuse.compat.apex.parallel import SyncBatchNorm, convert_syncbn_model
from two_processes import in_two_processes


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each process found in each job."""
    jobs = ("train_with_an_overflow", "parallel_options")
    return in_two_processes(tmp_path_factory.mktemp("ranks"), *jobs)


def test_an_overflow_on_one_rank_skips_the_step_on_both(results):
    first, second = (found["train_with_an_overflow"] for found in results)
    assert first["skipped"] == second["skipped"] == [0, 1, 0, 0]
    assert first["scales"] == second["scales"] == [2.0**8, 2.0**7, 2.0**7, 2.0**7]
    for a, b in zip(
        first["weights"] + first["masters"], second["weights"] + second["masters"], strict=True
    ):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    def changed(step):
        before, after = first["weights"][step], first["weights"][step + 1]
        return any(not torch.equal(x, y) for x, y in zip(before, after, strict=True))

    assert [changed(step) for step in range(4)] == [True, False, True, True]


def test_options_of_distributed_data_parallel(results):
    for found in results:
        assert found["parallel_options"] == {
            "mean": 1.5,
            "sum": 3.0,
            "predivided": 1.5,
            "fp32": 1.5,
            "delayed": 1.5,
            "reducer": 0.5,
            "reducer of a module": 0.5,
            "averaged": [[1.5, 1.5], [4.5, 4.5, 4.5], [1.5, 1.5]],
            "broadcast": 1.0,
            "group": 1,
        }


# --- alone --------------------------------------------------------------------------------------


def test_conversion_keeps_tensors_and_modes():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.BatchNorm2d(4, momentum=None)))
    model.eval()
    old = model[1][0]
    assert convert_syncbn_model(model) is model
    new = model[1][0]
    assert isinstance(new, SyncBatchNorm)
    assert new.weight is old.weight
    assert new.running_var is old.running_var
    assert new.momentum is None
    assert not new.training
    assert convert_syncbn_model(model)[1][0] is new
    bare = convert_syncbn_model(nn.BatchNorm1d(2, affine=False, track_running_stats=False))
    assert isinstance(bare, SyncBatchNorm)
    assert bare.weight is None
    assert convert_syncbn_model(nn.InstanceNorm1d(2)).__class__ is nn.InstanceNorm1d


@pytest.mark.parametrize(("level", "weights"), [("O2", torch.float32), ("O3", torch.float16)])
def test_amp_treats_it_as_a_batch_norm(level, weights):
    model = nn.Sequential(nn.Linear(3, 4), SyncBatchNorm(4))
    apex.amp.initialize(model, opt_level=level, verbosity=0)
    assert model[0].weight.dtype == torch.float16
    assert model[1].weight.dtype == weights
    model(torch.rand(4, 3)).sum().backward()


def test_shared_param_is_explained():
    with pytest.raises(ValueError, match="delay_allreduce"):
        apex.parallel.DistributedDataParallel(nn.Linear(1, 1), shared_param=True)


@pytest.mark.parametrize("size", [(4, 8, 6, 6), (4, 8, 6), (4, 8)])
@pytest.mark.parametrize("options", ["", "fuse_relu", "fuse_relu channel_last z"])
def test_alone_it_is_torchs_and_does_not_warn(size, options, recwarn):
    flags = dict.fromkeys(set(options.split()) - {"z"}, True)
    ours, torchs = SyncBatchNorm(8, **flags), nn.BatchNorm1d(8)
    torchs._check_input_dim = lambda x: None
    exact = {} if "z" in options else {"rtol": 0, "atol": 0}
    for training in (True, False):
        x, z = torch.randn(size), torch.randn(size)
        expected = torchs.train(training)(x)
        if "z" in options:
            expected = (expected + z).relu()
            found = ours.train(training)(x.movedim(1, -1), z.movedim(1, -1)).movedim(-1, 1)
        else:
            expected = expected.relu() if flags else expected
            found = ours.train(training)(x)
        torch.testing.assert_close(found, expected, **exact)
    torch.testing.assert_close(ours.running_mean, torchs.running_mean, **exact)
    torch.testing.assert_close(ours.running_var, torchs.running_var, **exact)
    assert not list(recwarn)
