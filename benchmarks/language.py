"""A language model of 0.3 billion parameters, trained by AdamW: tokens a second, memory and loss.

    python benchmarks/language.py            the times and memory of steps: minutes
    python benchmarks/language.py --losses   200 steps: three quarters of an hour on two cores

docs/memory.md describes the variants; each has a process of its own. The column memory_mib has the
peak of all tensors, bytes_per_param the bytes of weights, masters and states.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from functools import partial
from pydoc_data.topics import topics
from typing import Any

import harness.environment  # noqa: F401 - before torch, which reads the environment
import torch
from harness.measuring import Worker, WorkerError, held_bytes, measure
from harness.options import options_of
from harness.results import RESULTS, Results, conditions, put, rows_of
from nets import AmpfuseStep, Step, TorchAmp
from torch import Tensor, nn

# Layers, width, inner width, heads, vocabulary size.
SIZE = (20, 1024, 2816, 16, 32000)  # 322 million parameters
QUICK_SIZE = (2, 64, 128, 2, 8192)
BATCH, TOKENS = 1, 128
STEPS, WARM_UP, OF_A_POINT = 200, 20, 20
OPTIONS: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


def text() -> Tensor:
    """Python's manual, as int64 [tokens]: one for each word or mark."""
    words = re.findall(r"\w+|\W", "\n".join(map(topics.get, sorted(topics))))
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    return torch.tensor([numbers[word] for word in words])


class OnText(Step):
    """Each step takes other tokens. Gradients go at once, so that nothing but the training is held
    after it."""

    def __init__(self, quick: bool, device: torch.device) -> None:
        super().__init__("language", quick, device)
        self.losses: list[Tensor] = []

    def make_model(self, network: str, quick: bool) -> None:
        import transformers as hf

        layers, width, inner, heads, vocab_size = QUICK_SIZE if quick else SIZE
        sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": inner}
        config = hf.LlamaConfig(
            vocab_size=vocab_size, num_attention_heads=heads, use_cache=False, **sizes
        )
        self.model = hf.LlamaForCausalLM(config)
        self.text = text()
        self.cast = lambda output: output.logits.float()

    def make_optimizer(self, network: str) -> Any:
        return torch.optim.AdamW(self.model.parameters(), **OPTIONS, fused=True)

    def prepare(self) -> None:
        """Nothing: every step counts."""

    def __call__(self) -> None:
        number = len(self.losses)
        random = torch.Generator().manual_seed(number)
        starts = torch.randint(len(self.text) - TOKENS, (BATCH, 1), generator=random)
        tokens = self.text[(starts + torch.arange(TOKENS + 1)).to(self.device)]
        self.x, self.y = tokens[:, :-1], tokens[:, 1:]
        for group in self.optimizer.param_groups:
            group["lr"] = OPTIONS["lr"] * min(1, (number + 1) / WARM_UP)
        self.step()
        self.optimizer.zero_grad()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        self.losses.append(loss.detach())
        return loss

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def answer(self) -> dict[str, Any]:
        """Bytes of weights and states, the number of parameters, and the losses so far."""
        return {
            "held": held_bytes(self.model, self.optimizer),
            "params": sum(parameter.numel() for parameter in self.model.parameters()),
            "losses": [float(loss) for loss in self.losses],
        }


class Autocast(TorchAmp, OnText):
    """torch.autocast and torch's fused AdamW."""


class EightBit(OnText):
    """BF16 weights and bitsandbytes' AdamW."""

    def make_optimizer(self, network: str) -> Any:
        import bitsandbytes

        params = self.model.to(torch.bfloat16).parameters()
        return bitsandbytes.optim.AdamW8bit(params, **OPTIONS)


class O5(AmpfuseStep, OnText):
    """O5, fused; `memory` has options of the optimizer."""

    def __init__(self, *arguments: Any, master_weights: Any = True, **memory: Any) -> None:
        self.memory = memory
        masters = {"master_weights": master_weights}
        super().__init__(*arguments, clip="ours", memory=masters)

    def make_optimizer(self, network: str) -> Any:
        import ampfuse

        return ampfuse.optim.AdamW(self.model.parameters(), **OPTIONS, **self.memory)


VARIANTS: dict[str, Any] = {
    "torch.autocast": Autocast,
    "bitsandbytes AdamW8bit": EightBit,
    "O5": O5,
    "O5, split, 8bit": partial(O5, master_weights="split", state_dtype="8bit"),
    "O5, no masters, 8bit": partial(
        O5, master_weights=False, rounding="stochastic", state_dtype="8bit"
    ),
}


def add_losses(variant: str, call: Any, options: Any) -> None:
    """Train and write the mean loss of every 20 steps, in nats per token."""
    seconds = sum(measure({"": call}, 2 * OF_A_POINT if options.quick else STEPS, 0)[""]) / 1e3
    rows = []
    for point, losses in enumerate(torch.tensor(call.answer()["losses"]).split(OF_A_POINT), 1):
        row = {"variant": variant, "step": point * OF_A_POINT, "loss": f"{losses.mean():.4f}"}
        rows.append(row | conditions(options.device))
    print(f"{variant}: loss {rows[-1]['loss']}, {seconds:.0f} s", flush=True)
    if not options.quick:
        put(RESULTS / "language_losses.csv", rows, ["variant"], [(name,) for name in VARIANTS])


def main() -> None:
    """Measures, and writes the CSV."""
    options = options_of(__doc__, "language", losses="the losses of 200 steps, and no times")
    device, results = options.device, Results(options)
    torch.set_num_threads(options.threads[-1])
    wanted = [*filter(results.want, VARIANTS)]

    def worker_of(name: str, stack: ExitStack) -> Any:
        worker = stack.enter_context(Worker(device, with_ampfuse="O5" in name))
        try:
            return worker.variant(VARIANTS[name], options.quick, device)
        except WorkerError as error:  # keeps no other from being measured
            print(f"{name}: not run ({error})")

    if options.losses:
        for name in wanted:
            with ExitStack() as stack:  # one after another
                if call := worker_of(name, stack):
                    add_losses(name, call, options)
        return
    with ExitStack() as stack:
        calls = {name: call for name in wanted if (call := worker_of(name, stack))}
        if not calls:
            return results.finish()  # says so
        times = measure(calls, options.repeats, 2)
        answers = {name: call.answer() for name, call in calls.items()}
        memory = {name: call.memory_mib() for name, call in calls.items()}
        if device.type == "cpu":  # where that is what a call allocates
            memory = {name: mib + answers[name]["held"] / 2**20 for name, mib in memory.items()}
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
