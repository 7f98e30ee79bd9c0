"""Language modelling with accumulation, clipping of the masters, a fused optimizer and a restart."""

import argparse
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from apex import amp
from apex.amp import _amp_state
from apex.normalization import FusedLayerNorm as LayerNorm
from apex.optimizers import FusedLAMB

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O2")
parser.add_argument("--no-amp", action="store_true")
args = parser.parse_args()
MAX_STEPS, ACCUMULATION_STEPS = 30, 2


class Layer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm1 = LayerNorm(hidden, eps=1e-12)
        self.norm2 = LayerNorm(hidden, eps=1e-12)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = torch.matmul(q, k.transpose(-1, -2)) / q.size(-1) ** 0.5
        probs = nn.Softmax(dim=-1)(scores)
        x = self.norm1(x + self.out(torch.matmul(probs, v)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, vocab=13, hidden=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList([Layer(hidden) for _ in range(2)])
        self.head = nn.Linear(hidden, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


def prepare_model_and_optimizer():
    torch.manual_seed(42)
    model = Model()
    no_decay = ["bias", "norm"]
    params = list(model.named_parameters())
    decayed = [p for n, p in params if not any(nd in n for nd in no_decay)]
    others = [p for n, p in params if any(nd in n for nd in no_decay)]
    grouped = [
        {"params": decayed, "weight_decay": 0.01},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = FusedLAMB(grouped, lr=1e-2)
    model, optimizer = amp.initialize(
        model, optimizer, enabled=not args.no_amp, opt_level=args.opt_level, loss_scale="dynamic"
    )
    if not args.no_amp:
        amp._amp_state.loss_scalers[0]._loss_scale = 2**12
    return model, optimizer


def save(path, model, optimizer, step):
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "master params": list(amp.master_params(optimizer)),
            "amp": amp.state_dict(),
            "step": step,
        },
        path,
    )


def load(path, model, optimizer):
    checkpoint = torch.load(path, weights_only=False)
    model.load_state_dict(checkpoint["model"])
    if not args.no_amp:
        optimizer._lazy_init_maybe_master_weights()
        optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(checkpoint["optimizer"])
    for param, saved_param in zip(amp.master_params(optimizer), checkpoint["master params"]):
        param.data.copy_(saved_param.data)
    amp.load_state_dict(checkpoint["amp"])
    return checkpoint["step"]


def take_optimizer_step(optimizer):
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    for param in [p for group in optimizer.param_groups for p in group["params"]]:
        param.grad = None


model, optimizer = prepare_model_and_optimizer()
path = os.path.join(tempfile.mkdtemp(), "ckpt.pt")
step = 0
while step < MAX_STEPS:
    if step == MAX_STEPS // 2:  # the job's time is over; the next one goes on
        save(path, model, optimizer, step)
        model, optimizer = prepare_model_and_optimizer()
        step = load(path, model, optimizer)
    total = 0.0
    for micro in range(ACCUMULATION_STEPS):
        generator = torch.Generator().manual_seed(100 * step + micro)
        start = torch.randint(0, 13, (8, 1), generator=generator)
        ids = (start + torch.arange(6)) % 13
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 13), ids[:, 1:].reshape(-1))
        loss = loss / ACCUMULATION_STEPS
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        total += loss.item()
    take_optimizer_step(optimizer)
    step += 1
if not args.no_amp:
    print("loss scale", _amp_state.loss_scalers[0].loss_scale())
print("final loss: %.6f" % total)
