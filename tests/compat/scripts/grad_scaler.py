"""torch's GradScaler around apex's FusedAdam, which has the masters of a half model.

The gradients are looked at after the step: their norms say when the learning rate has to fall.
"""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--no-apex", action="store_true")
parser.add_argument("--half", action="store_true", help="convolutions in FP16, with masters")
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)
)
if args.half:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.half()
if args.no_apex:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0)
else:
    from apex.optimizers import FusedAdam

    optimizer = FusedAdam(
        model.parameters(), lr=0.01, capturable=True, master_weights=args.half
    )
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=15)

target = torch.arange(32) % 4
input = 0.5 * torch.randn(32, 1, 6, 6)
input[:, 0, :3] += (target % 2).view(-1, 1, 1).float()
input[:, 0, :, :3] += (target // 2).view(-1, 1, 1).float()
for step in range(40):
    with torch.autocast("cpu", dtype=torch.float16, enabled=args.half):
        loss = nn.functional.cross_entropy(model(input).float(), target)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    norm = sum(p.grad.float().pow(2).sum() for p in model.parameters()).sqrt().item()
    if norm > 0.6:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    optimizer.zero_grad()
print("final loss: %.6f" % loss.item())
