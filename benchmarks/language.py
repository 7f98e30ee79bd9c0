"""A language model of 0.3 billion parameters, trained by AdamW: tokens a second, memory and loss.

    python benchmarks/language.py            the times and memory of steps: minutes
    python benchmarks/language.py --losses   200 steps: three quarters of an hour on two cores

docs/memory.md describes the variants; each has a process of its own. The column memory_mib has the
peak of all tensors, bytes_per_param the bytes of weights, masters and states.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.nn.functional as F
from harness.measuring import Clock, Worker, held_bytes, measure
from harness.results import RESULTS, Results, conditions, options_of, put, rows_of
from torch import Tensor, nn

# Layers, width, inner width, heads, vocabulary size: 322 million parameters, less for --quick.
SIZES = {False: (20, 1024, 2816, 16, 32000), True: (2, 64, 128, 2, 8192)}
BATCH, TOKENS = 1, 128
STEPS, WARM_UP, OF_A_POINT = 200, 20, 20
OPTIONS: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def text() -> Tensor:
    """Python's manual, as int64 [tokens]: one for each word or mark."""
    words = re.findall(r"\w+|\W", "\n".join(map(topics.get, sorted(topics))))
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    return torch.tensor([numbers[word] for word in words])


class Training:
    """torch.autocast and torch's fused AdamW, which the others change."""

    autocast = True

    def __init__(self, quick: bool, device: torch.device) -> None:
        import transformers as hf

        layers, width, inner, heads, vocab_size = SIZES[quick]
        sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner}
        config = hf.LlamaConfig(
            vocab_size=vocab_size, num_attention_heads=heads, use_cache=False, **sizes
        )
        torch.manual_seed(0)
        self.model = hf.LlamaForCausalLM(config).to(device)
        self.text, self.device, self.number = text().to(device), device, 0
        self.make()
        self.losses: list[Tensor] = []

    def make(self) -> None:
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), **OPTIONS, fused=True)

    def loss(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            logits = self.model(tokens[:, :-1]).logits
            return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def __call__(self) -> None:
        """A step; its gradients go at once, so that nothing but the training is held after it."""
        random = torch.Generator().manual_seed(self.number)
        starts = torch.randint(len(self.text) - TOKENS, (BATCH, 1), generator=random)
        tokens = self.text[(starts + torch.arange(TOKENS + 1)).to(self.device)]
        for group in self.optimizer.param_groups:
            group["lr"] = OPTIONS["lr"] * min(1, (self.number + 1) / WARM_UP)
        loss = self.loss(tokens)
        self.backward(loss)
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())
        self.number += 1

    def answer(self) -> dict[str, Any]:
        """Bytes of weights and states, the number of parameters, and the losses so far."""
        return {
            "held": held_bytes(self.model, self.optimizer),
            "params": sum(parameter.numel() for parameter in self.model.parameters()),
            "losses": [float(loss) for loss in self.losses],
        }


class EightBit(Training):
    autocast = False

    def make(self) -> None:
        import bitsandbytes

        self.model.to(torch.bfloat16)
        self.optimizer = bitsandbytes.optim.AdamW8bit(self.model.parameters(), **OPTIONS)


class Ours(Training):
    """O5 with these options of the optimizer."""

    autocast = False

    def __init__(self, *arguments: Any, **memory: Any) -> None:
        self.memory = memory
        super().__init__(*arguments)

    def make(self) -> None:
        import ampfuse

        self.ampfuse = ampfuse
        masters = self.memory.pop("master_weights", True)
        optimizer = ampfuse.optim.AdamW(self.model.parameters(), **OPTIONS, **self.memory)
        options = {"opt_level": "O5", "master_weights": masters, "fuse": True, "verbosity": 0}
        self.model, self.optimizer = ampfuse.amp.initialize(self.model, optimizer, **options)

    def backward(self, loss: Tensor) -> None:
        with self.ampfuse.amp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()

    def clip(self) -> None:
        self.ampfuse.amp.clip_grad_norm_(self.optimizer, 1.0)


VARIANTS: dict[str, Any] = {
    "torch.autocast": Training,
    "bitsandbytes AdamW8bit": EightBit,
    "O5": Ours,
    "O5, split, 8bit": partial(Ours, master_weights="split", state_dtype="8bit"),
    "O5, no masters, 8bit": partial(
        Ours, master_weights=False, rounding="stochastic", state_dtype="8bit"
    ),
}


@dataclass(frozen=True, kw_only=True)
class LossRow:
    """The mean loss of the steps up to `step`, in nats per token."""

    variant: str
    step: int
    loss: float
    hardware: str
    torch: str
    ampfuse: str
    date: str


def main() -> None:
    """Measures, and writes the CSV."""
    options = options_of(__doc__, "language", losses="the losses of 200 steps, and no times")
    device, results = options.device, Results(options)
    torch.set_num_threads(options.threads[-1])
    wanted = {name: make for name, make in VARIANTS.items() if results.want(name)}

    def worker_of(name: str, stack: ExitStack) -> Any:
        worker = stack.enter_context(Worker(Clock, device, with_ampfuse="O5" in name))
        return worker.variant(wanted[name], options.quick, device)

    if options.losses:
        steps = 2 * OF_A_POINT if options.quick else STEPS
        for name in wanted:
            with ExitStack() as stack:  # one after another
                call = worker_of(name, stack)
                times = measure({name: call}, steps, 0)[name]
                losses = torch.tensor(call.answer()["losses"]).split(OF_A_POINT)
            rows = [
                LossRow(
                    variant=name,
                    step=(point + 1) * OF_A_POINT,
                    loss=round(float(values.mean()), 4),
                    **conditions(device),
                )
                for point, values in enumerate(losses)
            ]
            print(f"{name}: loss {rows[-1].loss}, {sum(times) / 1e3:.0f} s", flush=True)
            if not options.quick:
                put(RESULTS / "language_losses.csv", rows, attrgetter("variant"), list(VARIANTS))
        return
    with ExitStack() as stack:
        calls = {name: worker_of(name, stack) for name in wanted}
        times = measure(calls, options.repeats, 2)
        answers = {name: call.answer() for name, call in calls.items()}
        memory = {
            name: call.memory_mib() + answers[name]["held"] / 2**20 * (device.type == "cpu")
            for name, call in calls.items()
        }
    params = next(iter(answers.values()))["params"]
    held = {name: round(answer["held"] / params, 2) for name, answer in answers.items()}
    case = f"Llama {params / 1e6:.0f}M (batch {BATCH}, sequence {TOKENS})"
    given = {"params": params, "case": case, "optimizer": "AdamW", "dtype": "bf16"}
    results.add(rows_of(device, times, bytes_per_param=held, memory_mib=memory, **given))
    for row in results.rows:
        rate = BATCH * TOKENS / row.median_ms * 1e3
        print(f"{row.variant:26s} {rate:7.1f} tokens/s, {row.memory_mib:8.1f} MiB at the peak")
    results.finish()


if __name__ == "__main__":
    main()
