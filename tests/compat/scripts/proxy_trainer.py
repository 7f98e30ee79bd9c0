"""A trainer that hands its loop a stand-in for the model, which passes for it."""

import argparse

import torch
import torch.nn as nn

from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--no-amp", action="store_true")
parser.add_argument("--opt-level", default="O1")
parser.add_argument("--half-outputs", action="store_true")
args = parser.parse_args()
STEPS = 25


class Handle:
    """The model for the loop: counts the calls, and is the model for everybody else."""

    def __init__(self, module):
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "calls", 0)

    @property
    def __class__(self):
        return self._module.__class__

    def __getattr__(self, name):
        return getattr(self._module, name)

    def __setattr__(self, name, value):
        setattr(self._module, name, value)

    def forward(self, *args, **kwargs):
        object.__setattr__(self, "calls", self.calls + 1)
        return self._module(*args, **kwargs)

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)


class Trainer:
    def __init__(self, model):
        self.model = Handle(model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.criterion = nn.CrossEntropyLoss()
        if not args.no_amp:
            self.model, self.optimizer = amp.initialize(
                self.model,
                self.optimizer,
                opt_level=args.opt_level,
                cast_model_outputs=torch.float16 if args.half_outputs else None,
                verbosity=0,
            )

    def train(self, x, y):
        self.model.train()
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(x).float(), y)
            if args.no_amp:
                loss.backward()
            else:
                with amp.scale_loss(loss, self.optimizer) as scaled_loss:
                    scaled_loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def evaluate(self, x, y):
        self.model.eval()
        return self.criterion(self.model(x).float(), y).item()


torch.manual_seed(0)
x = torch.randn(48, 1, 8, 8)
y = (x.mean((1, 2, 3)) > 0).long()
trainer = Trainer(
    nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2))
)
trainer.train(x, y)
final = trainer.evaluate(x, y)
assert isinstance(trainer.model, nn.Sequential)
assert trainer.model.calls == STEPS + 1
print("final loss: %.6f" % final)
