"""A loop with network_to_half and FP16_Optimizer, from before amp."""

import argparse

import torch
import torch.nn as nn

from apex.fp16_utils import FP16_Optimizer, network_to_half

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--static-loss-scale", type=float, default=1)
parser.add_argument("--dynamic-loss-scale", action="store_true")
args = parser.parse_args()

torch.manual_seed(1)
model = nn.Sequential(
    nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)
)
if args.fp16:
    model = network_to_half(model)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
if args.fp16:
    optimizer = FP16_Optimizer(
        optimizer,
        static_loss_scale=args.static_loss_scale,
        dynamic_loss_scale=args.dynamic_loss_scale,
    )
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=15, gamma=0.5)

target = torch.arange(24) % 3
input = 0.5 * torch.randn(24, 1, 6, 6) + target.view(-1, 1, 1, 1)
for step in range(40):
    output = model(input)
    loss = criterion(output.float(), target)
    optimizer.zero_grad()
    if args.fp16:
        optimizer.backward(loss)
        optimizer.clip_master_grads(1.0)
    else:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
print("final loss: %.6f" % loss.item())
