"""A character model with weight norm on its LSTM, saved without it, trained in half by hand."""

import argparse

import torch
import torch.nn as nn

from apex.fp16_utils import FP16_Optimizer
from apex.reparameterization import apply_weight_norm, remove_weight_norm

parser = argparse.ArgumentParser()
parser.add_argument("--fp16", action="store_true")
parser.add_argument("--no_weight_norm", action="store_true")
parser.add_argument("--hook_child", action="store_true")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--save", default="")
parser.add_argument("--load", default="")


class RNNModel(nn.Module):
    def __init__(self, ntoken=16, ninp=12, nhid=24):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, batch_first=True)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, x):
        return self.decoder(self.rnn(self.encoder(x))[0])


def batches(epoch):
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(12):
        start = torch.randint(16, (24, 1), generator=generator)
        yield (start + 3 * torch.arange(9)) % 16


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    model = RNNModel()
    if not args.no_weight_norm:
        apply_weight_norm(model, "rnn", hook_child=args.hook_child)
        names = [name for name, _ in model.named_parameters() if name.endswith(("_g", "_v"))]
        assert names == [f"rnn.weight_{k}_l0_{end}" for k in ("ih", "hh") for end in "gv"]
    if args.fp16:
        model.half()
    optim = torch.optim.Adam(model.parameters(), lr=0.02)
    if args.fp16:
        optim = FP16_Optimizer(optim, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2**12})
    epoch = 0
    if args.load:
        saved = torch.load(args.load)
        epoch = saved["epoch"]
        model.load_state_dict(saved["sd"])
        optim.load_state_dict(saved["optim"])
    for epoch in range(epoch, args.epochs):
        for text in batches(epoch):
            out = model(text[:, :-1]).float()
            loss = nn.functional.cross_entropy(out.reshape(-1, 16), text[:, 1:].reshape(-1))
            optim.zero_grad()
            if args.fp16:
                optim.backward(loss, update_master_grads=False)
                optim.update_master_grads()
                optim.clip_master_grads(1.0)
            else:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.step()
    if args.save:
        saved = {"sd": model.state_dict(), "optim": optim.state_dict(), "epoch": args.epochs}
        torch.save(saved, args.save)

    def evaluate():
        with torch.no_grad():
            text = next(iter(batches(1000)))
            out = model(text[:, :-1]).float()
            return nn.functional.cross_entropy(out.reshape(-1, 16), text[:, 1:].reshape(-1)).item()

    final = evaluate()
    if not args.no_weight_norm:
        remove_weight_norm(model)
        assert not [name for name in model.state_dict() if name.endswith(("_g", "_v"))]
        assert abs(evaluate() - final) < 1e-3
    print("final loss: %.6f" % final)


if __name__ == "__main__":
    main()
