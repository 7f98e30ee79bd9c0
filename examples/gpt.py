"""A small GPT that learns Python's manual byte by byte, to be read from top to bottom.

    python examples/gpt.py                       BF16 weights, FP32 masters (level O5)
    python examples/gpt.py --precision native    torch.autocast in BF16, without ampfuse

The recipe is nanoGPT's: AdamW with warm-up and cosine, gradients of several batches added up and
clipped at a norm of 1. The text is what help() shows. Two minutes on two CPU cores.
"""

import argparse
import contextlib
import functools
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

CONTEXT, BATCH, ACCUMULATE, LAYERS, HEADS = 64, 12, 2, 4, 4  # 2 batches of 12 in a step


class Block(nn.Module):
    """Attention to what came before, then two linear layers, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        for table in (self.token, self.place):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:  # bytes to the logits of what follows each
        x = self.token(text) + self.place.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def main(argv: list[str] | None = None) -> float:
    """Train, print the losses and a line that the model writes; return the held-out loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", default="O5", help="native, or a level: O0 to O5")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="file for the loss of each step")
    args = parser.parse_args(argv)

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = torch.tensor(list("\n".join(topics.values()).encode()), device=device)
    train, held_out = text.tensor_split([len(text) * 9 // 10])
    held_out = held_out.unfold(0, CONTEXT + 1, CONTEXT)[:100]  # windows that touch

    model = GPT(args.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, (0.9, 0.95), weight_decay=0.1)
    schedule = OneCycleLR(optimizer, 2e-3, args.steps, pct_start=0.1, cycle_momentum=False)
    if args.precision == "native":
        compute, backward = torch.autocast(device, torch.bfloat16), Tensor.backward
        clip = functools.partial(nn.utils.clip_grad_norm_, list(model.parameters()))
    else:
        from ampfuse import amp

        model, optimizer = amp.initialize(model, optimizer, opt_level=args.precision, verbosity=0)
        compute, clip = contextlib.nullcontext(), functools.partial(amp.clip_grad_norm_, optimizer)

        def backward(loss: Tensor) -> None:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()

    def loss_of(windows: Tensor) -> Tensor:
        with compute:
            return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    losses = ["step,loss"]
    for step in range(1, args.steps + 1):
        loss = torch.zeros((), device=device)
        for _ in range(ACCUMULATE):
            starts = torch.randint(len(train) - CONTEXT, (BATCH, 1), device=device)
            part = loss_of(train[starts + torch.arange(CONTEXT + 1, device=device)])
            backward(part / ACCUMULATE)
            loss += part.detach() / ACCUMULATE
        clip(1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(f"{step},{loss:.5f}")
        if step % 100 == 0 or step == args.steps:
            with torch.no_grad():
                held_out_loss = loss_of(held_out).item()
            print(f"step {step}: train loss {loss:.3f}, held-out loss {held_out_loss:.3f}")
    if args.csv:
        args.csv.write_text("\n".join(losses) + "\n")

    line = torch.tensor([list(b"The ")], device=device)
    with torch.no_grad(), compute:
        for _ in range(60):
            odds = model(line[:, -CONTEXT:])[0, -1].float().softmax(0)
            line = torch.cat([line, torch.multinomial(odds, 1)[None]], 1)
    print(bytes(line[0].tolist()).decode(errors="replace").replace("\n", " "))
    return held_out_loss


if __name__ == "__main__":
    main()
