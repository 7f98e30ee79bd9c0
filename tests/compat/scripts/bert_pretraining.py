"""Language modelling that reduces gradients itself, decides on overflow, and starts again midway."""

import argparse
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import amp_C
import apex_C
from apex import amp
from apex.amp import _amp_state
from apex.normalization import FusedLayerNorm as LayerNorm
from apex.optimizers import FusedLAMB

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O2")
parser.add_argument("--no-amp", action="store_true")
parser.add_argument("--allreduce_post_accumulation_fp16", action="store_true")
args = parser.parse_args()
MAX_STEPS, ACCUMULATION_STEPS, INIT_LOSS_SCALE, OVERFLOW_AT = 16, 2, 2**20, [2, 5, 6, 11]

skipped_steps = 0


class Layer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.norm1 = LayerNorm(hidden, eps=1e-12)
        self.norm2 = LayerNorm(hidden, eps=1e-12)
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = torch.matmul(q, k.transpose(-1, -2)) / q.size(-1) ** 0.5
        x = self.norm1(x + torch.matmul(nn.Softmax(dim=-1)(scores), v))
        return self.norm2(x + F.gelu(self.dense(x)))


class Model(nn.Module):
    def __init__(self, vocab=13, hidden=16):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList([Layer(hidden) for _ in range(2)])
        self.decoder = nn.Linear(hidden, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.decoder(x)


def prepare_model_and_optimizer():
    torch.manual_seed(42)
    model = Model()
    groups = {0.01: [], 0.0: []}
    for name, param in model.named_parameters():
        groups[0.0 if "bias" in name or "norm" in name else 0.01].append(param)
    grouped = [{"params": params, "weight_decay": decay} for decay, params in groups.items()]
    optimizer = FusedLAMB(grouped, lr=1e-2)
    if not args.no_amp:
        options = {"loss_scale": "dynamic", "cast_model_outputs": torch.float16}
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, **options)
        amp._amp_state.loss_scalers[0]._loss_scale = INIT_LOSS_SCALE
    return model, optimizer


def save(path, model, optimizer, global_step):
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "master params": list(amp.master_params(optimizer)),
        "amp": None if args.no_amp else amp.state_dict(),
        "step": global_step,
    }
    torch.save(state, path)


def load(path, model, optimizer):
    saved = torch.load(path, weights_only=False)
    model.load_state_dict(saved["model"])
    if not args.no_amp:
        optimizer._lazy_init_maybe_master_weights()
        optimizer._amp_stash.lazy_init_called = True
        amp.load_state_dict(saved["amp"])
    optimizer.load_state_dict(saved["optimizer"])
    for param, saved_param in zip(amp.master_params(optimizer), saved["master params"]):
        param.data.copy_(saved_param.data)
    return saved["step"]


def take_optimizer_step(optimizer, model, overflow_buf, global_step):
    global skipped_steps
    scaler = None if args.no_amp else _amp_state.loss_scalers[0]
    loss_scale = 1 if scaler is None else scaler.loss_scale()
    master_grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
    dtype = torch.float16 if args.allreduce_post_accumulation_fp16 else torch.float32
    flat_raw = torch.empty(sum(p.numel() for p in master_grads), dtype=dtype)
    views = apex_C.unflatten(flat_raw, master_grads)
    overflow_buf.zero_()
    scale = loss_scale / ACCUMULATION_STEPS
    amp_C.multi_tensor_scale(65536, overflow_buf, [master_grads, views], scale)
    # Here processes would reduce flat_raw.
    overflow_buf.zero_()
    amp_C.multi_tensor_scale(65536, overflow_buf, [views, master_grads], 1.0 / loss_scale)
    had_overflow = 0
    if scaler is not None:
        old_overflow_buf = scaler._overflow_buf
        scaler._overflow_buf = overflow_buf
        had_overflow = scaler.update_scale()
        scaler._overfloat_buf = old_overflow_buf
    if had_overflow == 0:
        optimizer.step()
        global_step += 1
    else:
        skipped_steps += 1
        print("overflow: the loss scale is", scaler.loss_scale())
        if _amp_state.opt_properties.master_weights:
            for param in optimizer._amp_stash.all_fp32_from_fp16_params:
                param.grad = None
    for param in model.parameters():
        param.grad = None
    return global_step


model, optimizer = prepare_model_and_optimizer()
path = os.path.join(tempfile.mkdtemp(), "ckpt.pt")
overflow_buf = torch.zeros(1, dtype=torch.int32)
planted = [] if args.no_amp else list(OVERFLOW_AT)
global_step = 0
restarts = [MAX_STEPS // 2]
while global_step < MAX_STEPS:
    if global_step in restarts:  # the job's time is over; the next one goes on
        save(path, model, optimizer, global_step)
        model, optimizer = prepare_model_and_optimizer()
        global_step = load(path, model, optimizer)
        restarts.clear()
    overflows = bool(planted) and planted[0] == global_step
    average_loss = 0.0
    for micro in range(ACCUMULATION_STEPS):
        generator = torch.Generator().manual_seed(100 * global_step + 10 * micro)
        start = torch.randint(0, 13, (8, 1), generator=generator)
        ids = (start + torch.arange(6)) % 13
        loss = F.cross_entropy(model(ids[:, :-1]).float().reshape(-1, 13), ids[:, 1:].reshape(-1))
        average_loss += loss.item() / ACCUMULATION_STEPS
        if overflows and micro == 0:
            loss = loss * float("inf")
        if args.no_amp:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer, delay_overflow_check=True) as scaled_loss:
                scaled_loss.backward()
    global_step = take_optimizer_step(optimizer, model, overflow_buf, global_step)
    if overflows:
        planted.pop(0)
if not args.no_amp:
    scale = _amp_state.loss_scalers[0].loss_scale()
    assert skipped_steps >= len(OVERFLOW_AT)
    assert scale == INIT_LOSS_SCALE / 2**skipped_steps
print("final loss: %.6f" % average_loss)
