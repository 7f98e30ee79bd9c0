"""How long the host is busy with a training step at O1, against torch.amp's autocast.

    python benchmarks/o1_host.py [--device cuda] [--quick]

The models are so small that next to nothing is left of the kernels but their calls: 37 linear
layers of width 8 with ReLU between them ("mlp"), and 6 transformer encoder layers of width 16
("transformer"). Variants:

    torch.amp       torch.autocast (FP16, on) around forward pass and loss, torch's GradScaler
    ampfuse O1      amp.initialize at O1, amp.scale_loss
    ampfuse.compat  the same by the apex alias, whose O1 follows apex's lists in the whole process;
                    "outside": the model is part of the one that amp was given, whose forward is
                    not called
    FP32            no amp

Two cases a model: "pass" is forward pass, loss and backward pass, with what amp does around them;
"step" adds the optimizer, torch's SGD, which ampfuse steps in its fused form. On a GPU this is the
time of the Python calls, with the GPU idle before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from harness import measure, rows_of
from host_time import HostClock
from step import Results, options_of
from torch import Tensor, nn

from ampfuse import amp
from ampfuse.amp import cast_state, op_casts
from ampfuse.amp import session as sessions
from ampfuse.compat.apex import amp as apex_amp


def mlp() -> nn.Module:
    """Of 37 linear layers; takes (batch, 8)."""
    layers: list[nn.Module] = []
    for _ in range(37):
        layers += [nn.Linear(8, 8), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def transformer() -> nn.Module:
    """Of 6 encoder layers; takes (batch, length, 16)."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (8, 8)),
    "transformer": (transformer, (4, 8, 16)),
}


class Training:
    """A step of training, and what has to be set up in the process before it."""

    def __init__(self, model: str, device: torch.device, steps: bool) -> None:
        torch.manual_seed(0)
        make, shape = MODELS[model]
        self.model = make().to(device)
        self.x = torch.randn(shape, device=device)
        self.y = torch.randn(shape, device=device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.steps = steps

    def prepare(self) -> None:
        """Undo what another variant did to the process."""
        op_casts.remove()
        cast_state.set_outside(cast_state.AS_WRITTEN)

    def loss(self) -> Tensor:
        return F.mse_loss(self.model(self.x), self.y)

    def backward(self) -> None:
        self.loss().backward()

    def step(self) -> None:
        self.optimizer.step()

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        if self.steps:
            self.step()


class TorchAmp(Training):
    def __init__(self, model: str, device: torch.device, steps: bool) -> None:
        super().__init__(model, device, steps)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)

    def backward(self) -> None:
        with torch.autocast(self.x.device.type, dtype=torch.float16):
            loss = self.loss()
        self.scaler.scale(loss).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Ours(Training):
    """By `api`: ``ampfuse.amp``, or the one of apex's names."""

    api: Any = amp

    def __init__(self, model: str, device: torch.device, steps: bool) -> None:
        super().__init__(model, device, steps)
        self.api.initialize(self.initialized(), self.optimizer, opt_level="O1", verbosity=0)
        self.session = sessions.latest()

    def initialized(self) -> nn.Module:
        return self.model

    def prepare(self) -> None:
        super().prepare()
        sessions.set_latest(self.session)

    def backward(self) -> None:
        with self.api.scale_loss(self.loss(), self.optimizer) as scaled:
            scaled.backward()


class Alias(Ours):
    api = apex_amp


class Outside(Alias):
    def initialized(self) -> nn.Module:
        return nn.ModuleList([self.model])


VARIANTS: dict[str, type[Training]] = {
    "torch.amp": TorchAmp,
    "ampfuse O1": Ours,
    "ampfuse.compat": Alias,
    "ampfuse.compat, outside": Outside,
    "FP32": Training,
}


def cases() -> Iterator[tuple[str, str, bool]]:
    for model in MODELS:
        for what in ("pass", "step"):
            yield f"{model}-{what}", model, what == "step"


def main() -> None:
    """Measures every variant of each case and writes the CSV."""
    options = options_of(__doc__, "o1_host")
    torch.set_num_threads(1)
    repeats = options.repeats if options.quick else max(options.repeats, 200)
    results = Results(options)
    for name, model, steps in cases():
        if not results.want(name):
            continue
        variants = {key: make(model, options.device, steps) for key, make in VARIANTS.items()}
        times = measure(HostClock(options.device), variants, repeats, warm_up=5)
        found = rows_of(options.device, times, case=name, optimizer="SGD", dtype="float16")
        results.add(found)
    results.finish()


if __name__ == "__main__":
    main()
