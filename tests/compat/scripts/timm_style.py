"""Training with models, optimizers and clipping from timm."""

import argparse

import torch
import torch.nn as nn
from timm import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import dispatch_clip_grad

from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--no-amp", action="store_true")
parser.add_argument("--opt-level", default="O1")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--save", default="")
parser.add_argument("--resume", default="")


class ApexScaler:
    def __call__(self, loss, optimizer, clip_grad):
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        dispatch_clip_grad(amp.master_params(optimizer), clip_grad, mode="norm")
        optimizer.step()

    def state_dict(self):
        return amp.state_dict()

    def load_state_dict(self, state_dict):
        amp.load_state_dict(state_dict)


def dataset(seed, count):
    generator = torch.Generator().manual_seed(seed)
    target = torch.arange(count) % 4
    images = 0.3 * torch.randn(count, 3, 32, 32, generator=generator)
    images[:, 0, :16] += (target % 2).view(-1, 1, 1).float()
    images[:, 1, :, :16] += (target // 2).view(-1, 1, 1).float()
    return list(zip(images.split(16), target.split(16)))


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    model = create_model("test_resnet", num_classes=4)
    optimizer = create_optimizer_v2(model, opt="lookahead_momentum", lr=0.2, weight_decay=0.01)
    enabled = not args.no_amp
    model, optimizer = amp.initialize(model, optimizer, enabled, opt_level=args.opt_level)
    loss_scaler = ApexScaler()

    start_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume)
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loss_scaler.load_state_dict(checkpoint["amp"])
        start_epoch = checkpoint["epoch"]

    train = dataset(1, 64)
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="step", decay_epochs=2, decay_rate=0.5, warmup_epochs=0
    )
    criterion = nn.CrossEntropyLoss()
    for epoch in range(start_epoch, args.epochs):
        scheduler.step(epoch)
        model.train()
        for input, target in train:
            loss = criterion(model(input), target)
            optimizer.zero_grad()
            loss_scaler(loss, optimizer, clip_grad=1.0)

    model.eval()
    with torch.no_grad():
        losses = [criterion(model(x).float(), y).item() for x, y in dataset(2, 32)]
    if args.save:
        state = {"epoch": args.epochs, "state_dict": model.state_dict()}
        state |= {"optimizer": optimizer.state_dict(), "amp": loss_scaler.state_dict()}
        torch.save(state, args.save)
    print("final loss: {:.6f}".format(sum(losses) / len(losses)))


if __name__ == "__main__":
    main()
