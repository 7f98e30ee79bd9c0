"""Item vectors in a sparse embedding, which SparseAdam steps, and a dense rest in AdamW."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O1")
parser.add_argument("--no-amp", action="store_true")
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--steps", type=int, default=40)
args = parser.parse_args()


class Recommender(nn.Module):
    def __init__(self, items=200, hidden=16, classes=4):
        super().__init__()
        self.items = nn.EmbeddingBag(items, hidden, mode="sum", sparse=True)
        self.mlp = nn.Sequential(nn.Linear(hidden, 32), nn.ReLU(), nn.Linear(32, classes))

    def forward(self, history):
        return self.mlp(self.items(history))


torch.manual_seed(1)
model = Recommender()
sparse = torch.optim.SparseAdam(model.items.parameters(), lr=0.02)
dense = torch.optim.AdamW(model.mlp.parameters(), lr=0.01)
model, optimizers = amp.initialize(
    model, [sparse, dense], enabled=not args.no_amp, opt_level=args.opt_level
)
generator = torch.Generator().manual_seed(2)
kind_of = torch.randint(0, 4, (200,), generator=generator)
for step in range(args.steps):
    for _ in range(args.accumulate):
        history = torch.randint(0, 200, (64, 5), generator=generator)
        target = kind_of[history].mode().values
        loss = F.cross_entropy(model(history), target) / args.accumulate
        with amp.scale_loss(loss, optimizers) as scaled_loss:
            scaled_loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
print(f"final loss: {loss.item() * args.accumulate:.6f}")
