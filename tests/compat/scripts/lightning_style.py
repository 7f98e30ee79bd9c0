"""A trainer that owns the loop, and a module that says what a step is: automatic optimization."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

from apex import amp


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.current_epoch = 0
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


class ApexPlugin:
    """What a trainer does around a step of half precision."""

    def __init__(self, enabled, level):
        self.enabled, self.level = enabled, level

    def connect(self, model, optimizers):
        return amp.initialize(model, optimizers, enabled=self.enabled, opt_level=self.level)

    def convert_input(self, model, batch):
        dtype = next(model.parameters()).dtype
        return [t.to(dtype) if t.is_floating_point() else t for t in batch]

    def backward(self, loss, optimizer):
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    def clip_gradients(self, optimizer, value):
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), value)


class Trainer:
    def __init__(self, max_epochs, plugin, gradient_clip_val, accumulate_grad_batches):
        self.max_epochs, self.plugin = max_epochs, plugin
        self.clip, self.accumulate = gradient_clip_val, accumulate_grad_batches
        self.global_step = 0

    def fit(self, model, train_batches, val_batches, ckpt_path=None):
        self.model = model
        self.optimizers, self.schedulers = model.configure_optimizers()
        self.model, self.optimizers = self.plugin.connect(model, self.optimizers)
        if ckpt_path:
            self.restore(torch.load(ckpt_path))
        for epoch in range(model.current_epoch, self.max_epochs):
            model.train()
            for batch_idx, batch in enumerate(train_batches(epoch)):
                self.run_batch(self.plugin.convert_input(model, batch), batch_idx)
            for scheduler in self.schedulers:
                scheduler.step()
            model.current_epoch = epoch + 1
        model.eval()
        with torch.no_grad():
            return [
                model.validation_step(self.plugin.convert_input(model, batch), batch_idx).item()
                for batch_idx, batch in enumerate(val_batches)
            ]

    def run_batch(self, batch, batch_idx):
        (optimizer,) = self.optimizers
        step = (batch_idx + 1) % self.accumulate == 0

        def closure():
            loss = self.model.training_step(batch, batch_idx)["loss"] / self.accumulate
            if batch_idx % self.accumulate == 0:
                optimizer.zero_grad()
            self.plugin.backward(loss, optimizer)
            return loss

        closure()
        if step:
            self.plugin.clip_gradients(optimizer, self.clip)
            optimizer.step()
            self.global_step += 1

    def save_checkpoint(self, path):
        checkpoint = {
            "epoch": self.model.current_epoch,
            "global_step": self.global_step,
            "state_dict": self.model.state_dict(),
            "optimizer_states": [optimizer.state_dict() for optimizer in self.optimizers],
            "lr_schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "amp_scaling_state": amp.state_dict(),
        }
        torch.save(checkpoint, path)

    def restore(self, checkpoint):
        self.model.load_state_dict(checkpoint["state_dict"])
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
            optimizer.load_state_dict(state)
        for scheduler, state in zip(self.schedulers, checkpoint["lr_schedulers"]):
            scheduler.load_state_dict(state)
        amp.load_state_dict(checkpoint["amp_scaling_state"])
        self.model.current_epoch = checkpoint["epoch"]
        self.global_step = checkpoint["global_step"]


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
    parser.add_argument("--max-epochs", type=int, default=4)
    parser.add_argument("--save", default="")
    parser.add_argument("--resume", default="")
    args = parser.parse_args()
    torch.manual_seed(0)
    plugin = ApexPlugin(not args.no_amp, args.opt_level)
    trainer = Trainer(args.max_epochs, plugin, gradient_clip_val=1.0, accumulate_grad_batches=2)
    losses = trainer.fit(
        Classifier(), lambda epoch: batches(epoch, 10), list(batches(99, 4)), args.resume or None
    )
    if args.save:
        trainer.save_checkpoint(args.save)
    print("final loss: {:.6f}".format(sum(losses) / len(losses)))


if __name__ == "__main__":
    main()
