"""``apex.parallel`` in two processes with gloo, and alone."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ampfuse.compat.apex as apex
from ampfuse.compat.apex import amp
from ampfuse.compat.apex.parallel import SyncBatchNorm, convert_syncbn_model
from ampfuse.compat.apex.parallel.distributed import flat_dist_call
from programs import in_two_processes

# --- in two processes ---------------------------------------------------------------------------


def model_and_optimizer(level, **ddp):
    torch.manual_seed(dist.get_rank())  # DDP gives both the weights of the first
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    model = apex.parallel.convert_syncbn_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return apex.parallel.DistributedDataParallel(model, **ddp), optimizer


def train_with_an_overflow():
    """The second step overflows on the second process only."""
    rank = dist.get_rank()
    model, optimizer = model_and_optimizer("O2")
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**8

    def copies(params):
        return [p.detach().float().clone() for p in params]

    records = {"weights": [copies(model.parameters())], "masters": [], "scales": [], "skipped": []}
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        loss = model(torch.rand(4, 4, generator=generator)).float().pow(2).mean()
        if step == 1 and rank == 1:
            loss = loss * float("inf")
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        records["weights"].append(copies(model.parameters()))
        records["masters"].append(copies(amp.master_params(optimizer)))
        records["scales"].append(amp.state_dict()["loss_scaler0"]["loss_scale"])
        records["skipped"].append(optimizer.last_step.skipped.item())
    return records


def gradients(**ddp):
    """The gradient of rank + 1, as each option of DDP reduces it."""
    model = nn.Linear(1, 1, bias=False).half()
    model = apex.parallel.DistributedDataParallel(model, **ddp)
    (model(torch.ones(1, 1, dtype=torch.half)) * (dist.get_rank() + 1)).sum().backward()
    return model.module.weight.grad.item()


def gradients_of_two_passes():
    """Without an all-reduce in the first one; outside of amp, and with its gradients set aside."""
    plain = nn.Linear(1, 1, bias=False)
    values = {"two passes": two_passes(plain, lambda loss: loss.backward())}
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)

    def backward(loss):
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()

    return values | {"two passes of amp": two_passes(model, backward)}


def two_passes(module, backward):
    model, found = apex.parallel.DistributedDataParallel(module), []
    for change in (model.disable_allreduce, model.enable_allreduce):
        change()
        backward((model(torch.ones(1, 1)) * (dist.get_rank() + 1)).sum())
        found.append(module.weight.grad.item())
    return found


def parallel_options():
    values = {
        "mean": gradients(),
        "sum": gradients(gradient_average=False),
        "predivided": gradients(gradient_predivide_factor=2.0),
        "fp32": gradients(allreduce_always_fp32=True),
        "delayed": gradients(delay_allreduce=True, message_size=1),
    }
    values |= gradients_of_two_passes()
    p = nn.Parameter(torch.ones(1))
    p.grad = torch.full((1,), float(dist.get_rank()))
    apex.parallel.Reducer([p.grad]).reduce()
    values["reducer"] = p.grad.item()
    module = nn.Linear(1, 1)
    module.weight.grad = torch.full((1, 1), float(dist.get_rank()))
    module.weight.data.fill_(dist.get_rank())
    apex.parallel.Reducer(module).reduce()
    values["reducer of a module"] = module.weight.grad.item(), module.weight.item()
    half = torch.full((2, 1), float(dist.get_rank() + 1), dtype=torch.half)
    several = [half, torch.full((3,), 4.0 + dist.get_rank()), half.clone()]
    flat_dist_call(several, dist.all_reduce)
    values["averaged"] = [tensor.flatten().tolist() for tensor in several]
    flat_dist_call([several[0], p.data.fill_(dist.get_rank())], dist.broadcast, (1,))
    values["broadcast"] = p.item()
    group = apex.parallel.create_syncbn_process_group(1)
    values["group"] = dist.get_world_size(group)
    assert apex.parallel.create_syncbn_process_group(0) is None
    return values


# How many of six images the first process has; whether a ReLU and a residual are applied; more.
SYNC_CASES = {
    "uneven": {"first": 2, "relu": True, "add": True},
    "alone": {"first": 3, "relu": False, "add": False, "momentum": None},
    "with ReLU": {"first": 4, "relu": True, "add": False},
    "with add": {"first": 4, "relu": False, "add": True},
    "an empty batch": {"first": 0, "relu": True, "add": True},
    "NCHW": {"first": 2, "relu": True, "add": True, "format": torch.contiguous_format},
    "a large mean": {"first": 2, "relu": False, "add": False, "mean": 100.0},
    "channel_last": {"first": 2, "relu": True, "add": True, "channel_last": True},
}


def sync_step(norm, case, dtype, rows=slice(None)):
    """Output, gradients of the inputs and of the parameters, and statistics, for some images."""
    layout, generator = case.get("format", torch.channels_last), torch.Generator().manual_seed(0)
    x, z, factors = torch.randn(3, 6, 4, 3, 3, generator=generator)
    x = x * 3 + case.get("mean", 10.0)
    inputs = [
        (t + 1).to(dtype)[rows].clone(memory_format=layout).requires_grad_()
        for t in ([x, z] if case["add"] else [x])
    ]
    with torch.no_grad():
        for i, tensor in enumerate([*norm.parameters(), *norm.buffers()]):
            if tensor.dim():
                tensor.copy_(torch.tensor([0.5, 1.25, 1.0, 0.75]) + i / 8)
    if type(norm) is nn.BatchNorm2d:
        out = norm(inputs[0]) + (inputs[1] if case["add"] else 0.0)
        out = out.relu() if case["relu"] else out
    elif norm.channel_last:
        out = norm(*(t.permute(0, 2, 3, 1) for t in inputs)).permute(0, 3, 1, 2)
    else:
        out = norm(*inputs)
    assert out.dtype == dtype
    assert out.is_contiguous(memory_format=layout)
    (out * factors[rows]).sum().backward()
    return {
        "by row": [out.detach(), *(t.grad for t in inputs)],
        "sums": [p.grad for p in norm.parameters()],
        "equal": list(norm.buffers()),
    }


def sync_batch_norms():
    steps = {}
    for name, case in SYNC_CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            rows = [slice(0, case["first"]), slice(case["first"], None)][dist.get_rank()]
            options = {"fuse_relu": case["relu"], "channel_last": "channel_last" in case}
            norm = SyncBatchNorm(4, momentum=case.get("momentum", 0.1), **options)
            steps[f"{name} {dtype}"] = sync_step(norm, case, dtype, rows)
    return steps


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The findings of each process in each job."""
    folder = tmp_path_factory.mktemp("ranks")
    return in_two_processes(folder, train_with_an_overflow, parallel_options, sync_batch_norms)


def test_an_overflow_on_one_rank_skips_the_step_on_both(results):
    first, second = (rank["train_with_an_overflow"] for rank in results)
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
    for number, rank in enumerate(results):
        assert rank["parallel_options"] == {
            "mean": 1.5,
            "sum": 3.0,
            "predivided": 1.5,
            "fp32": 1.5,
            "delayed": 1.5,
            "two passes": [number + 1.0, 3.0],
            "two passes of amp": [number + 1.0, 3.0],
            "reducer": 0.5,
            "reducer of a module": (0.5, 0.0),
            "averaged": [[1.5, 1.5], [4.5, 4.5, 4.5], [1.5, 1.5]],
            "broadcast": 1.0,
            "group": 1,
        }


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("name", SYNC_CASES)
def test_batch_norms_of_two_processes_are_one_of_the_whole_batch(results, name, dtype, rtol):
    case = SYNC_CASES[name]
    norm = nn.BatchNorm2d(4, momentum=case.get("momentum", 0.1))
    expected = sync_step(norm, case, dtype)
    first, second = (found["sync_batch_norms"][f"{name} {dtype}"] for found in results)
    found = {
        "by row": [torch.cat(pair) for pair in zip(first["by row"], second["by row"], strict=True)],
        "sums": [a + b for a, b in zip(first["sums"], second["sums"], strict=True)],
    }
    for equal in (first["equal"], second["equal"]):
        torch.testing.assert_close(found | {"equal": equal}, expected, rtol=rtol, atol=4 * rtol)


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
