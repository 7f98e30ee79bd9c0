"""What two processes do in test_compat_parallel.py: ``python two_processes.py FOLDER``."""

import sys

import torch
import torch.distributed as dist
from torch import nn

from ampfuse.compat import apex
from ampfuse.compat.apex import amp


def model_and_optimizer(level, **ddp):
    torch.manual_seed(dist.get_rank())  # DDP gives both the weights of the first
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1))
    model = apex.parallel.convert_syncbn_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    return apex.parallel.DistributedDataParallel(model, **ddp), optimizer


def weights(model):
    return [p.detach().float().clone() for p in model.parameters()]


def train_with_an_overflow():
    """The second step overflows on the second process only."""
    rank = dist.get_rank()
    model, optimizer = model_and_optimizer("O2")
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0**8
    found = {"weights": [weights(model)], "masters": [], "scales": [], "skipped": []}
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + rank)
        loss = model(torch.rand(4, 4, generator=generator)).float().pow(2).mean()
        if step == 1 and rank == 1:
            loss = loss * float("inf")
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        found["weights"].append(weights(model))
        masters = [p.detach().clone() for p in amp.master_params(optimizer)]
        found["masters"].append(masters)
        found["scales"].append(amp.state_dict()["loss_scaler0"]["loss_scale"])
        found["skipped"].append(optimizer.last_step.skipped.item())
    return found


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
    group = apex.parallel.create_syncbn_process_group(1)
    found["group"] = dist.get_world_size(group)
    assert apex.parallel.create_syncbn_process_group(0) is None
    return found


def batch_norm():
    """Forward, backward and running statistics of a batch norm over both halves of a batch."""
    torch.manual_seed(0)
    x = torch.rand(6, 3, 2, 2) * 3 + 100.0
    factors = torch.rand(6, 3, 2, 2)
    rank = dist.get_rank()
    mine = x[rank * 2 : rank * 2 + 2 + 2 * rank].clone().requires_grad_()  # 2 and 4 of 6
    norm = apex.parallel.SyncBatchNorm(3)
    out = norm(mine)
    (out * factors[rank * 2 : rank * 2 + 2 + 2 * rank]).sum().backward()
    dist.all_reduce(norm.weight.grad)
    return {
        "out": out.detach(),
        "grad": mine.grad,
        "weight": norm.weight.grad,
        "mean": norm.running_mean,
        "var": norm.running_var,
    }


JOBS = (train_with_an_overflow, parallel_options, batch_norm)

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.save({job.__name__: job() for job in JOBS}, f"{sys.argv[1]}/{dist.get_rank()}.pt")
    dist.destroy_process_group()
