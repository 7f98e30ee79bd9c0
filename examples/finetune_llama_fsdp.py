"""finetune_llama_one_gpu.py on several GPUs: FSDP2 shards the model, to be read from top to bottom.

    torchrun --nproc-per-node 8 examples/finetune_llama_fsdp.py --shape 8b --length 4096 --compile
    torchrun --nproc-per-node 2 examples/finetune_llama_fsdp.py       a small Llama, on any machine

Each rank keeps, and steps, its part of the BF16 weights, their split masters and the 8-bit moments.
Gradients are reduced in FP32, and the norm is clipped in the step, in which the ranks also agree
whether to skip it. A checkpoint by torch.distributed.checkpoint goes on with any number of ranks;
while it is written or read, each rank holds 12 bytes for each parameter of its part more.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from finetune_llama_one_gpu import SIZES, build, read
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ampfuse


def shard(model: nn.Module, compiled: bool) -> None:
    """Shard each block, which is gathered for its forward and backward pass, then the rest."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model.decoder.model.layers:
        if compiled:
            block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def main(argv: list[str] | None = None) -> list[float]:
    """Train; return the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder with a model and its tokenizer")
    parser.add_argument("--shape", choices=SIZES, default="small", help="of random weights")
    parser.add_argument("--text", type=Path, help="what to learn, in place of Python's manual")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step, of all ranks")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--checkpoint", type=Path, help="folder to go on from, and to save to")
    args = parser.parse_args(argv, argparse.Namespace(level="O5"))

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same weights on all ranks, which keep their parts
    model = build(args, random=False)
    shard(model, args.compile)
    model.to(device)
    memory = {"master_weights": "split", "state_dtype": "8bit", "max_grad_norm": 1.0}
    optimizer = ampfuse.optim.AdamW(
        model.parameters(), args.lr, (0.9, 0.95), weight_decay=0.1, **memory
    )
    # The metadata are written last: without them a checkpoint is incomplete.
    found = args.checkpoint.glob("*/.metadata") if args.checkpoint else []
    if done := max((int(path.parent.name) for path in found), default=0):
        saved = states(model, optimizer)
        dcp.load(saved, checkpoint_id=args.checkpoint / str(done))
        weights, moments = saved["model"], saved["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

    text = read(args)
    losses = []
    begin = time.perf_counter()
    for step in range(done + 1, args.steps + 1):
        drawn = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - args.length, (args.batch, 1), generator=drawn)
        windows = text[starts + torch.arange(args.length + 1)]
        loss = model(windows[rank::ranks].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step % 10 == 0 and rank == 0:
            rate = args.batch * args.length * (step - done) / (time.perf_counter() - begin)
            print(f"step {step}: loss {loss:.3f}, {rate:,.0f} tokens/s", flush=True)
    if args.checkpoint:
        dcp.save(states(model, optimizer), checkpoint_id=args.checkpoint / str(args.steps))
    dist.destroy_process_group()
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    main()
