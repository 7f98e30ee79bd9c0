"""A trainer that owns the loop, and a module that says what a step is: automatic optimization."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

from apex import amp


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 4),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return {"loss": F.cross_entropy(self.net(x), y)}  # not through forward

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x).float(), y)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)]


class Trainer:
    def __init__(self, max_epochs, amp_options, gradient_clip_val, accumulate_grad_batches):
        self.max_epochs, self.amp_options = max_epochs, amp_options
        self.clip, self.accumulate = gradient_clip_val, accumulate_grad_batches

    def fit(self, model, train_batches):
        self.optimizers, self.schedulers = model.configure_optimizers()
        self.model, self.optimizers = amp.initialize(model, self.optimizers, **self.amp_options)
        for epoch in range(self.max_epochs):
            model.train()
            for batch_idx, batch in enumerate(train_batches(epoch)):
                self.run_batch(self.convert_input(batch), batch_idx)
            for scheduler in self.schedulers:
                scheduler.step()

    @torch.no_grad()
    def validate(self, batches):
        self.model.eval()
        losses = [
            self.model.validation_step(self.convert_input(batch), batch_idx).item()
            for batch_idx, batch in enumerate(batches)
        ]
        return sum(losses) / len(losses)

    def convert_input(self, batch):
        dtype = next(self.model.parameters()).dtype
        return [t.to(dtype) if t.is_floating_point() else t for t in batch]

    def run_batch(self, batch, batch_idx):
        (optimizer,) = self.optimizers
        loss = self.model.training_step(batch, batch_idx)["loss"] / self.accumulate
        if batch_idx % self.accumulate == 0:
            optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        if (batch_idx + 1) % self.accumulate == 0:
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), self.clip)
            optimizer.step()


def batches(seed, count):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        y = torch.randint(4, (16,), generator=generator)
        x = torch.randn(16, 1, 6, 6, generator=generator) * 0.5
        x[:, 0, :3] += (y % 2).view(-1, 1, 1).float()
        x[:, 0, :, :3] += (y // 2).view(-1, 1, 1).float()
        yield x, y


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-amp", action="store_true")
    parser.add_argument("--opt-level", default="O1")
    args = parser.parse_args()
    torch.manual_seed(0)
    amp_options = {"enabled": not args.no_amp, "opt_level": args.opt_level}
    trainer = Trainer(4, amp_options, gradient_clip_val=1.0, accumulate_grad_batches=2)
    trainer.fit(Classifier(), lambda epoch: batches(epoch, 10))
    print("final loss: {:.6f}".format(trainer.validate(batches(99, 4))))


if __name__ == "__main__":
    main()
