"""Every parameter of a language model of 8 billion, on one GPU of 80 GB; to be read top to bottom.

    python examples/finetune_llama_one_gpu.py                         a small Llama, on any machine
    python examples/finetune_llama_one_gpu.py --shape 8b --length 4096   Llama 3's shape, at random
    python examples/finetune_llama_one_gpu.py --model FOLDER --text FILE --lr 1e-5 --length 4096
    python examples/finetune_llama_one_gpu.py --level O2 --budget 15GB   FP16, as on Colab's T4

BF16 weights with masters that are exact in 16 more bits, and 8-bit moments: 8.1 bytes for each
parameter with its gradient. Blocks are checkpointed, and only some rows of logits are in memory.
With --checkpoint, a run that was stopped goes on with the same bits. ampfuse.plan comes first.
"""

import argparse
import functools
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ampfuse
from ampfuse import amp

SIZES = {"small": (128, 352, 3, 256, 4, 2), "8b": (4096, 14336, 32, 128256, 32, 8)}
HALF = {"O2": torch.float16, "O5": torch.bfloat16}
NAMES = """hidden_size intermediate_size num_hidden_layers vocab_size num_attention_heads
    num_key_value_heads""".split()


class LanguageModel(nn.Module):
    """The mean loss of each token, given those before it."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.decoder = decoder.train()
        for block in decoder.model.layers:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, length + 1), int64
        hidden = self.decoder.model(tokens[:, :-1], use_cache=False).last_hidden_state
        head = self.decoder.get_output_embeddings().weight
        return ampfuse.nn.linear_cross_entropy(hidden, head, tokens[:, 1:].contiguous())


def build(args: argparse.Namespace, random: bool = True) -> LanguageModel:
    """The model on torch's default device; `random`: without the folder's weights."""
    auto, dtype = hf.AutoModelForCausalLM, HALF[args.level]
    if args.model and not random:
        return LanguageModel(auto.from_pretrained(args.model, dtype=dtype))
    if args.model:
        config = hf.AutoConfig.from_pretrained(args.model)
    else:
        sizes = dict(zip(NAMES, SIZES[args.shape], strict=True))
        config = hf.LlamaConfig(**sizes, rope_theta=5e5)
    return LanguageModel(auto.from_config(config, dtype=dtype))


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    memory = {"master_weights": "split", "state_dtype": "8bit"}
    return ampfuse.optim.AdamW(params, 2e-3, (0.9, 0.95), weight_decay=0.1, **memory)


def read(args: argparse.Namespace) -> Tensor:
    """The tokens of the text; without a tokenizer its bytes are tokens."""
    text = args.text.read_text("utf-8") if args.text else "\n".join(topics.values())
    if not args.model:
        return torch.tensor(list(text.encode()))
    tokenizer = hf.AutoTokenizer.from_pretrained(args.model)
    return tokenizer(text, return_tensors="pt")["input_ids"][0]


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> None:
    """All that a run needs to go on. Nothing is copied: keep_vars=True keeps the BF16 weights."""
    more |= {"model": model.state_dict(keep_vars=True), "optimizer": optimizer.state_dict()}
    torch.save({"amp": amp.state_dict(), **more}, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)  # a crash leaves the checkpoint before


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Go on from a checkpoint. mmap=True reads each tensor when it is copied."""
    state = torch.load(path, map_location="cpu", mmap=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    amp.load_state_dict(state["amp"])
    torch.set_rng_state(state["random"])
    return state


def main(argv: list[str] | None = None) -> list[float]:
    """Train; return the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder with a model and its tokenizer")
    parser.add_argument("--shape", choices=SIZES, default="small", help="of random weights")
    parser.add_argument("--text", type=Path, help="what to learn, in place of Python's manual")
    parser.add_argument("--level", choices=("O5", "O2"), default="O5", help="O2: FP16, as for a T4")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=4, help="sequences in a backward pass")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=50)
    passes = "backward passes in a step; two or more add up in FP32: 4 bytes for each parameter"
    parser.add_argument("--passes", type=int, default=1, help=passes)
    parser.add_argument("--budget", default="80GB", help="memory to compare the plan with")
    parser.add_argument("--checkpoint", type=Path, help="file to go on from, and to save to")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    batch = torch.empty(args.batch, args.length + 1, dtype=torch.int64)
    options = {"opt_level": args.level, "budget": args.budget, "accumulate": args.passes > 1}
    print(ampfuse.plan(lambda: build(args), batch, make_optimizer, **options))

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = build(args, random=False)
    optimizer = make_optimizer(model.parameters())
    amp.initialize(model, optimizer, opt_level=args.level, verbosity=0)
    text, done = read(args), 0
    if args.checkpoint and args.checkpoint.exists():
        done = load(args.checkpoint, model, optimizer)["step"]
    optimizer.param_groups[0]["lr"] = args.lr

    losses, begin = [], time.perf_counter()
    for step in range(done + 1, args.steps + 1):
        total = torch.zeros((), device=device)
        for _ in range(args.passes):
            starts = torch.randint(len(text) - args.length, (args.batch, 1))
            loss = model(text[starts + torch.arange(args.length + 1)].to(device)) / args.passes
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            total += loss.detach()
        amp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if step % 10 == 0:
            seen = args.batch * args.length * args.passes * (step - done)
            rate = seen / (time.perf_counter() - begin)
            print(f"step {step}: loss {total:.3f}, {rate:,.0f} tokens/s")
    if device == "cuda":
        print(f"peak of tensors: {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    if args.checkpoint:
        save(args.checkpoint, model, optimizer, step=args.steps, random=torch.get_rng_state())
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    main()
