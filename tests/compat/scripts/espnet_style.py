"""Speech recognition: amp at some level, a loss of its own as a float function, then amp.init()."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--train-dtype", default="float32")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--snapshot", default="")
parser.add_argument("--resume", default="")


class CTC(nn.Module):
    def __init__(self, odim, eprojs):
        super().__init__()
        self.ctc_lo = nn.Linear(eprojs, odim)
        self.ctc_loss = nn.CTCLoss(reduction="mean")

    def loss_fn(self, th_pred, th_target, th_ilen, th_olen):
        assert th_pred.dtype == torch.float32
        return self.ctc_loss(th_pred.log_softmax(2), th_target, th_ilen, th_olen)

    def forward(self, hs_pad, hlens, ys_pad):
        ys_hat = self.ctc_lo(hs_pad).transpose(0, 1)
        olens = torch.full((ys_pad.size(0),), ys_pad.size(1))
        return self.loss_fn(ys_hat, ys_pad, hlens, olens)


class E2E(nn.Module):
    def __init__(self, idim=8, odim=6, eprojs=32):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(idim, eprojs), nn.Tanh(), nn.LayerNorm(eprojs))
        self.ctc = CTC(odim, eprojs)

    def forward(self, xs_pad, ilens, ys_pad):
        return self.ctc(self.enc(xs_pad), ilens, ys_pad)


TONES = torch.randn(6, 8, generator=torch.Generator().manual_seed(9))


def batches(epoch):
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(12):
        ys = torch.randint(1, 6, (16, 3), generator=generator)
        xs = TONES[ys.repeat_interleave(4, dim=1)]
        xs = xs + 0.1 * torch.randn(xs.shape, generator=generator)
        yield xs, torch.full((16,), 12), ys


def main():
    args = parser.parse_args()
    torch.manual_seed(1)
    model = E2E()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    use_apex = args.train_dtype in ("O0", "O1", "O2", "O3")
    if use_apex:
        from apex import amp

        model, optimizer = amp.initialize(model, optimizer, opt_level=args.train_dtype)
        for _ in range(3):  # as models do that register in their constructors
            amp.register_float_function(CTC, "loss_fn")
        amp.init()
    epoch = 0
    if args.resume:
        saved = torch.load(args.resume)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        epoch = saved["epoch"]
        if use_apex:
            amp.load_state_dict(saved["amp"])
            assert amp.state_dict() == saved["amp"]
    for epoch in range(epoch, args.epochs):
        for batch in batches(epoch):
            loss = model(*batch).mean()
            optimizer.zero_grad()
            if use_apex:
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
    if args.snapshot:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": args.epochs}
        if use_apex:
            saved["amp"] = amp.state_dict()
            assert list(saved["amp"]) == ["loss_scaler0"]
        torch.save(saved, args.snapshot)
    with torch.no_grad():
        losses = [model(*batch).float().item() for batch in batches(1000)]
    print("final loss: %.6f" % (sum(losses) / len(losses)))


if __name__ == "__main__":
    main()
