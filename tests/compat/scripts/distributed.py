"""apex.parallel's DistributedDataParallel and SyncBatchNorm, under torchrun or alone."""

import argparse
import os

import torch
import torch.distributed as dist

import apex
import apex.amp
from apex.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=0, type=int)
parser.add_argument("--opt-level", type=str, default="O1")
parser.add_argument("--no-amp", action="store_true")
args = parser.parse_args()

args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
if args.distributed:
    dist.init_process_group(backend="gloo", init_method="env://")
rank = dist.get_rank() if args.distributed else 0
world = dist.get_world_size() if args.distributed else 1

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(6, 16, bias=False),
    torch.nn.BatchNorm1d(16),
    torch.nn.ReLU(),
    torch.nn.Linear(16, 2),
)
model = apex.parallel.convert_syncbn_model(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = apex.amp.initialize(
    model, optimizer, enabled=not args.no_amp, opt_level=args.opt_level
)
if args.distributed:
    # FOR DISTRIBUTED: After amp.initialize, wrap the model with DDP.
    model = DDP(model, delay_allreduce=True)

x = torch.randn(32, 6)
y = (x.sum(1) > 0).long()
x, y = x[rank::world], y[rank::world]
loss_fn = torch.nn.CrossEntropyLoss()
for t in range(20):
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)
    with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

total = loss.detach().float().clone()
if args.distributed:
    dist.all_reduce(total)
if rank == 0:
    print("final loss: %.6f" % (total.item() / world))
if args.distributed:
    dist.destroy_process_group()
