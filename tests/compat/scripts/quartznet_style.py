"""Speech: an average of the weights by amp_C, batch norm's counters among them."""

import argparse
import copy

import torch
import torch.nn as nn

try:
    import amp_C
except ImportError:
    amp_C = None

parser = argparse.ArgumentParser()
parser.add_argument("--ema", type=float, default=0.9)
parser.add_argument("--amp-c", action="store_true")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--save", default="")
parser.add_argument("--resume", default="")


def apply_ema(model, ema_model, decay):
    sd = model.state_dict()
    for k, v in ema_model.state_dict().items():
        v.copy_(decay * v + (1 - decay) * sd[k])


def init_multi_tensor_ema(model, ema_model):
    model_weights = list(model.state_dict().values())
    ema_model_weights = list(ema_model.state_dict().values())
    return model_weights, ema_model_weights, torch.zeros(1, dtype=torch.int32)


def apply_multi_tensor_ema(decay, model_weights, ema_weights, overflow_buf):
    amp_C.multi_tensor_axpby(
        65536, overflow_buf, [ema_weights, model_weights, ema_weights], decay, 1 - decay, -1)
    assert not overflow_buf.item()


def batches(epoch):
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(12):
        x = torch.randn(16, 4, 12, generator=generator)
        yield x, x.mean(2).argmax(1)


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 16, 3), nn.BatchNorm1d(16), nn.ReLU(), nn.AdaptiveAvgPool1d(1),
                          nn.Flatten(), nn.Linear(16, 4))
    ema_model = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    epoch = 0
    if args.resume:
        saved = torch.load(args.resume)
        epoch = saved["epoch"]
        model.load_state_dict(saved["state_dict"])
        ema_model.load_state_dict(saved["ema_state_dict"])
        optimizer.load_state_dict(saved["optimizer"])
    if args.amp_c:
        ema = init_multi_tensor_ema(model, ema_model)
    for epoch in range(epoch, args.epochs):
        for x, y in batches(epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if args.amp_c:
                apply_multi_tensor_ema(args.ema, *ema)
            else:
                apply_ema(model, ema_model, args.ema)
    if args.save:
        torch.save({"epoch": args.epochs, "state_dict": model.state_dict(),
                    "ema_state_dict": ema_model.state_dict(),
                    "optimizer": optimizer.state_dict()}, args.save)
    ema_model.eval()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(ema_model(x), y).item() for x, y in batches(1000)]
    counted = ema_model[1].num_batches_tracked.item() / 1000
    print("final loss: %.6f" % (sum(losses) / len(losses) + counted))


if __name__ == "__main__":
    main()
