"""Language modelling that reduces gradients itself, after accumulation, and decides on overflow."""

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

import amp_C
import apex_C
from apex import amp
from apex.amp import _amp_state
from apex.optimizers import FusedLAMB
from apex.parallel.distributed import flat_dist_call

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O2")
parser.add_argument("--no-amp", action="store_true")
parser.add_argument("--allreduce_post_accumulation_fp16", action="store_true")
args = parser.parse_args()
MAX_STEPS, ACCUMULATION_STEPS, INIT_LOSS_SCALE, OVERFLOW_AT = 30, 2, 2**20, [4, 11, 12]

world_size = int(os.environ.get("WORLD_SIZE", 1))
if world_size > 1:
    torch.distributed.init_process_group(backend="gloo", init_method="env://")
rank = torch.distributed.get_rank() if world_size > 1 else 0
skipped_steps = 0


class Model(nn.Module):
    def __init__(self, vocab=13, hidden=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.dense = nn.Linear(2 * hidden, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.decoder = nn.Linear(hidden, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        x = torch.cat([x, x.mean(1, keepdim=True).expand_as(x)], dim=-1)
        return self.decoder(self.norm(F.gelu(self.dense(x))))


def take_optimizer_step(optimizer, model, overflow_buf, global_step):
    global skipped_steps
    scaler = None if args.no_amp else _amp_state.loss_scalers[0]
    loss_scale = 1 if scaler is None else scaler.loss_scale()
    master_grads = [p.grad for p in amp.master_params(optimizer) if p.grad is not None]
    flat_raw = torch.empty(
        sum(p.numel() for p in master_grads),
        dtype=torch.float16 if args.allreduce_post_accumulation_fp16 else torch.float32,
    )
    allreduced_views = apex_C.unflatten(flat_raw, master_grads)
    overflow_buf.zero_()
    amp_C.multi_tensor_scale(
        65536,
        overflow_buf,
        [master_grads, allreduced_views],
        loss_scale / (world_size * ACCUMULATION_STEPS),
    )
    if world_size > 1:
        torch.distributed.all_reduce(flat_raw)
    overflow_buf.zero_()
    amp_C.multi_tensor_scale(
        65536, overflow_buf, [allreduced_views, master_grads], 1.0 / loss_scale
    )
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


torch.manual_seed(42 + rank)
model = Model()
optimizer = FusedLAMB(model.parameters(), lr=2e-2)
if not args.no_amp:
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        loss_scale="dynamic",
        cast_model_outputs=torch.float16,
    )
    amp._amp_state.loss_scalers[0]._loss_scale = INIT_LOSS_SCALE
if world_size > 1:
    flat_dist_call([param.data for param in model.parameters()], torch.distributed.broadcast, (0,))

overflow_buf = torch.zeros(1, dtype=torch.int32)
planted = [] if args.no_amp else list(OVERFLOW_AT)
global_step = 0
while global_step < MAX_STEPS:
    overflows = bool(planted) and planted[0] == global_step
    average_loss = 0.0
    for micro in range(ACCUMULATION_STEPS):
        generator = torch.Generator().manual_seed(100 * global_step + 10 * micro + rank)
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
if rank == 0:
    print("final loss: %.6f" % average_loss)
if world_size > 1:
    torch.distributed.destroy_process_group()
