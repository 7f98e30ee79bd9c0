"""Self-supervision: synchronized batch norm on contiguous images, LARC, amp."""

import argparse
import warnings

import torch
import torch.nn as nn

try:
    import apex
    from apex.parallel.LARC import LARC
except ImportError:
    apex = None

parser = argparse.ArgumentParser()
parser.add_argument("--sync_bn", default="pytorch")
parser.add_argument("--use_fp16", default="", help="a level")
parser.add_argument("--larc", action="store_true")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--dump", default="")
parser.add_argument("--resume", default="")


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
                                  nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.projection_head = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(),
                                             nn.Linear(16, 4))

    def forward(self, x):
        return self.projection_head(self.conv(x))


def batches(epoch):
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(10):
        y = torch.randint(4, (32,), generator=generator)
        yield torch.randn(32, 1, 8, 8, generator=generator) * (1 + y)[:, None, None, None], y


def main():
    args = parser.parse_args()
    torch.manual_seed(31)
    model = Encoder()
    if args.sync_bn == "apex":
        group = apex.parallel.create_syncbn_process_group(0)
        model = apex.parallel.convert_syncbn_model(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-6)
    if args.larc:
        optimizer = LARC(optimizer=optimizer, trust_coefficient=0.02, clip=False)
    if args.use_fp16:
        model, optimizer = apex.amp.initialize(model, optimizer, opt_level=args.use_fp16)
    epoch = 0
    if args.resume:
        saved = torch.load(args.resume)
        epoch = saved["epoch"]
        model.load_state_dict(saved["state_dict"])
        optimizer.load_state_dict(saved["optimizer"])
        if args.use_fp16:
            apex.amp.load_state_dict(saved["amp"])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ampfuse")
        for epoch in range(epoch, args.epochs):
            for x, y in batches(epoch):
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                if args.use_fp16:
                    with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
                        scaled_loss.backward()
                else:
                    loss.backward()
                optimizer.step()
    if args.dump:
        saved = {"epoch": args.epochs, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
        if args.use_fp16:
            saved["amp"] = apex.amp.state_dict()
        torch.save(saved, args.dump)
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(x), y).item() for x, y in batches(1000)]
    print("final loss: %.6f" % (sum(losses) / len(losses)))


if __name__ == "__main__":
    main()
