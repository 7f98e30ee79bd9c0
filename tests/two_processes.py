"""What two processes do: ``python two_processes.py FOLDER JOB ...``."""

import sys

import torch
import torch.distributed as dist
from torch import nn

from ampfuse import insight
from ampfuse.compat import apex
from ampfuse.compat.apex import amp
from ampfuse.compat.apex.parallel.distributed import flat_dist_call
from programs import ranks


def in_two_processes(folder, *jobs):
    """What each process found, by job."""
    ranks(2, __file__, folder, *jobs)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


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

    found = {"weights": [copies(model.parameters())], "masters": [], "scales": [], "skipped": []}
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        loss = model(torch.rand(4, 4, generator=generator)).float().pow(2).mean()
        if step == 1 and rank == 1:
            loss = loss * float("inf")
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        found["weights"].append(copies(model.parameters()))
        found["masters"].append(copies(amp.master_params(optimizer)))
        found["scales"].append(amp.state_dict()["loss_scaler0"]["loss_scale"])
        found["skipped"].append(optimizer.last_step.skipped.item())
    return found


class _Exp(nn.Module):
    def forward(self, x):
        return x.exp()


def explain_an_overflow():
    """Half precision and an exp that leaves its range on the second process only."""
    model = nn.Sequential(nn.Linear(4, 4), _Exp(), nn.Linear(4, 1)).half()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
        model[0].bias.zero_()
    model = nn.parallel.DistributedDataParallel(model)
    explanations = []
    for value in (20.0 * dist.get_rank(), 0.0):
        with insight.explain_overflow(model) as watch:
            model(torch.full((2, 4), value, dtype=torch.half)).float().sum().backward()
            model.zero_grad()
        explanations.append(watch.explanation)
    found, then = explanations
    names = ("phase", "module", "operation")
    return {name: getattr(found, name) for name in names} | {"text": str(found), "then": then}


def gradients(**ddp):
    """The gradient of rank + 1, as each option of DDP reduces it."""
    model = nn.Linear(1, 1, bias=False).half()
    model = apex.parallel.DistributedDataParallel(model, **ddp)
    (model(torch.ones(1, 1, dtype=torch.half)) * (dist.get_rank() + 1)).sum().backward()
    return model.module.weight.grad.item()


def parallel_options():
    found = {
        "mean": gradients(),
        "sum": gradients(gradient_average=False),
        "predivided": gradients(gradient_predivide_factor=2.0),
        "fp32": gradients(allreduce_always_fp32=True),
        "delayed": gradients(delay_allreduce=True, message_size=1),
    }
    p = nn.Parameter(torch.ones(1))
    p.grad = torch.full((1,), float(dist.get_rank()))
    apex.parallel.Reducer([p.grad]).reduce()
    found["reducer"] = p.grad.item()
    module = nn.Linear(1, 1)
    module.weight.grad = torch.full((1, 1), float(dist.get_rank()))
    apex.parallel.Reducer(module).reduce()
    found["reducer of a module"] = module.weight.grad.item()
    half = torch.full((2, 1), float(dist.get_rank() + 1), dtype=torch.half)
    several = [half, torch.full((3,), 4.0 + dist.get_rank()), half.clone()]
    flat_dist_call(several, dist.all_reduce)
    found["averaged"] = [tensor.flatten().tolist() for tensor in several]
    flat_dist_call([several[0], p.data.fill_(dist.get_rank())], dist.broadcast, (1,))
    found["broadcast"] = p.item()
    group = apex.parallel.create_syncbn_process_group(1)
    found["group"] = dist.get_world_size(group)
    assert apex.parallel.create_syncbn_process_group(0) is None
    return found


# Of six images, how many the first process has; how they lie; which module normalizes them.
SYNC_CASES = {
    "uneven": {"first": 2, "relu": True, "add": True},
    "alone": {"first": 3, "relu": False, "add": False, "momentum": None},
    "with ReLU": {"first": 4, "relu": True, "add": False},
    "with add": {"first": 4, "relu": False, "add": True},
    "an empty batch": {"first": 0, "relu": True, "add": True},
    "NCHW": {"first": 2, "relu": True, "add": True, "format": torch.contiguous_format},
    "a large mean": {"first": 2, "relu": False, "add": False, "mean": 100.0},
    "channel_last": {"first": 2, "relu": True, "add": True, "module": "channel_last"},
}


def sync_inputs(dtype, case):
    """The whole batch, what is added to the result or None, and factors of its gradient."""
    layout, mean = case.get("format", torch.channels_last), case.get("mean", 10.0)
    generator = torch.Generator().manual_seed(0)
    x, z, factors = torch.randn(3, 6, 4, 3, 3, generator=generator)
    x, z = ((t + 1).to(dtype).contiguous(memory_format=layout) for t in (x * 3 + mean, z))
    return x.requires_grad_(), z.requires_grad_() if case["add"] else None, factors


def start(norm):
    """Parameters and statistics that are not 0 and 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in [*norm.parameters(), *norm.buffers()]:
            if tensor.dim():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return norm


def _sync_norm(case):
    """The module that normalizes, and how it is called."""
    channel_last = case.get("module") == "channel_last"
    options = {"channel_last": channel_last, "fuse_relu": case["relu"]}
    norm = start(apex.parallel.SyncBatchNorm(4, momentum=case.get("momentum", 0.1), **options))

    def call_last(*inputs):
        return norm(*(t.permute(0, 2, 3, 1) for t in inputs)).permute(0, 3, 1, 2)

    return norm, call_last if channel_last else norm


def sync_batch_norms():
    found = {}
    rank = dist.get_rank()
    for name, case in SYNC_CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            rows = slice(0, case["first"]) if rank == 0 else slice(case["first"], None)
            norm, call = _sync_norm(case)
            *inputs, factors = sync_inputs(dtype, case)
            layout = case.get("format", torch.channels_last)
            mine = [
                None if t is None else t.detach()[rows].clone(memory_format=layout).requires_grad_()
                for t in inputs
            ]
            out = call(*mine)
            (out * factors[rows]).sum().backward()
            assert out.dtype == dtype
            assert out.is_contiguous(memory_format=layout)
            found[f"{name} {dtype}"] = {
                "rows": [out.detach(), *(t.grad for t in mine if t is not None)],
                "sums": [p.grad for p in norm.parameters()],
                "equal": list(norm.buffers()),
            }
    return found


JOBS = (train_with_an_overflow, parallel_options, sync_batch_norms, explain_an_overflow)

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder, *names = sys.argv[1:]
    found = {job.__name__: job() for job in JOBS if job.__name__ in names}
    torch.save(found, f"{folder}/{dist.get_rank()}.pt")
    dist.destroy_process_group()
