"""Image classification, the way the ImageNet example did it with apex.amp, alone or in processes."""

import argparse
import os

import torch
import torch.nn as nn

import apex
import apex.amp
from apex.parallel import DistributedDataParallel as DDP
from apex.fp16_utils import *
from apex import amp, optimizers
from apex.multi_tensor_apply import multi_tensor_applier


def parse():
    parser = argparse.ArgumentParser(description="PyTorch ImageNet Training")
    parser.add_argument("--epochs", default=4, type=int, metavar="N")
    parser.add_argument("--resume", default="", type=str)
    parser.add_argument("--save", default="", type=str)
    parser.add_argument("--no-amp", action="store_true")
    parser.add_argument("--local_rank", default=0, type=int)
    parser.add_argument("--sync_bn", action="store_true")
    parser.add_argument("--opt-level", type=str, default="O1")
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    return parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = x + self.relu(self.bn2(self.conv2(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def dataset(n):
    target = torch.arange(n) % 4
    images = 0.5 * torch.randn(n, 3, 8, 8)
    images[:, 0] += (target % 2).view(-1, 1, 1).float()
    images[:, 1, :4] += (target // 2).view(-1, 1, 1).float()
    return torch.utils.data.TensorDataset(images, target)


def main():
    args = parse()
    args.rank, args.world_size = 0, int(os.environ.get("WORLD_SIZE", 1))
    args.distributed = args.world_size > 1
    if args.distributed:
        torch.distributed.init_process_group(backend="gloo", init_method="env://")
        args.rank = torch.distributed.get_rank()
    torch.manual_seed(0)

    model = Net()
    if args.sync_bn:
        model = apex.parallel.convert_syncbn_model(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    # Initialize Amp.  Amp accepts either values or strings for the optional override arguments,
    # for convenient interoperation with argparse.
    model, optimizer = amp.initialize(
        model,
        optimizer,
        enabled=not args.no_amp,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    if args.distributed:
        # FOR DISTRIBUTED: After amp.initialize, wrap the model with DDP.
        model = DDP(model, delay_allreduce=True)
    criterion = nn.CrossEntropyLoss()

    start_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume)
        start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        amp.load_state_dict(checkpoint["amp"])

    train, val = dataset(160), dataset(64)
    for epoch in range(start_epoch, args.epochs):
        generator = torch.Generator().manual_seed(epoch)
        train_loader = torch.utils.data.DataLoader(
            train, batch_size=16, shuffle=True, generator=generator
        )
        run_epoch(train_loader, model, criterion, optimizer, epoch, args)
        loss = validate(torch.utils.data.DataLoader(val, batch_size=32), model, criterion)
        if args.save:
            saved = {"epoch": epoch + 1, "state_dict": model.state_dict()}
            saved.update(optimizer=optimizer.state_dict(), amp=amp.state_dict())
            torch.save(saved, args.save)
    if args.rank == 0:
        print("final loss: {:.6f}".format(loss))
    if args.distributed:
        torch.distributed.destroy_process_group()


def run_epoch(train_loader, model, criterion, optimizer, epoch, args):
    model.train()
    for param_group in optimizer.param_groups:
        param_group["lr"] = 0.05 * (0.1 ** (epoch // 3))
    for input, target in train_loader:
        output = model(input[args.rank :: args.world_size])
        loss = criterion(output, target[args.rank :: args.world_size])
        optimizer.zero_grad()
        with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


def validate(val_loader, model, criterion):
    losses = []
    model.eval()
    for input, target in val_loader:
        with torch.no_grad():
            loss = criterion(model(input), target)
        losses.append(to_python_float(loss.data))
    return sum(losses) / len(losses)


if __name__ == "__main__":
    main()
