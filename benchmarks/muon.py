"""A step of Muon and AdamW against torch's, on the shapes of real models.

    python benchmarks/muon.py [--device cuda]     # GPT-2 small and ResNet-18
    python benchmarks/muon.py --only resnet18
    python benchmarks/muon.py --quick             # does it run? one layer of each

One step is: unscale, check for overflow, clip by one norm, update, cast back to BF16 weights.
"torch" is what users write by hand, in a process that never imports ampfuse: ``torch.optim.Muon``
on FP32 masters, whose convolutions are flattened since it takes matrices alone, beside fused AdamW
on the others', a GradScaler and ``clip_grad_norm_``. "products" is the part of our step that
orthogonalizes, and "peak" is how long as many operations would take in the fastest single product
of the run. The operations of a case are printed, in 1e9: torch's, and those of ours.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from harness.measuring import Clock, Variant, Worker, measure
from harness.results import Results, options_of, rows_of
from harness.routes import MAX_NORM, SCALE
from torch import Tensor, nn

STEPS = 5


def shapes_of(case: str, quick: bool) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all parameters; those of matrices for Muon are called weights."""
    if case == "gpt2-small":
        e, layers = 768, 1 if quick else 12
        layer = [("qkv.weight", (3 * e, e)), ("proj.weight", (e, e))]
        layer += [("fc.weight", (4 * e, e)), ("out.weight", (e, 4 * e))]
        layer += [("bias", (n,)) for n in (3 * e, e, 4 * e, e, e, e, e, e)]
        table = (64 if quick else 50257, e)
        return [("embedding", table), ("positions", (1024, e)), *layer * layers]
    from torchvision import models

    with torch.device("meta"):
        model = models.resnet18()
    found = [(name, tuple(param.shape)) for name, param in model.named_parameters()]
    found = found[-20:] if quick else found
    return [("head" if "fc" in n or len(s) < 2 else n, s) for n, s in found]


def tensors_of(case: str, quick: bool, device: torch.device) -> list[tuple[bool, Tensor, Tensor]]:
    """Of each parameter whether it is Muon's, its BF16 weight, and a scaled gradient."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for name, shape in shapes_of(case, quick):
        weight, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
        if len(shape) == 4:
            weight = weight.to(memory_format=torch.channels_last)
            gradient = gradient.to(memory_format=torch.channels_last)
        pair = 0.02 * weight, 1e-3 * SCALE * gradient
        found.append((name.endswith("weight"), *(t.to(device, torch.bfloat16) for t in pair)))
    return found


class Ours:
    """ampfuse's optimizer on BF16 parameters."""

    def __init__(self, case: str, quick: bool, device: torch.device) -> None:
        import ampfuse

        tensors = tensors_of(case, quick, device)
        kinds: dict[bool, list[Any]] = {True: [], False: []}
        for is_matrix, weight, gradient in tensors:
            param = nn.Parameter(weight)
            param.grad = gradient
            kinds[is_matrix].append(param)
        groups = [{"params": kinds[True]}, {"params": kinds[False], "algorithm": "adamw"}]
        self.optimizer = ampfuse.optim.Muon(
            groups, lr=1e-3, master_weights=True, max_grad_norm=MAX_NORM
        )
        self.scaler = ampfuse.GradScaler(device.type, init_scale=SCALE, growth_interval=2**30)
        self.scaler.scale(torch.ones((), device=device))

    def __call__(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Torchs:
    """What torch has for it."""

    def __init__(self, case: str, quick: bool, device: torch.device) -> None:
        tensors = tensors_of(case, quick, device)
        self.weights = [weight for _, weight, _ in tensors]
        self.gradients = [gradient for _, _, gradient in tensors]
        self.masters, kinds = [], {True: [], False: []}
        for is_matrix, weight, _ in tensors:
            master = nn.Parameter(weight.float().flatten(1) if is_matrix else weight.float())
            master.grad = torch.zeros_like(master)
            self.masters.append(master)
            kinds[is_matrix].append(master)
        self.optimizers = [
            torch.optim.Muon(kinds[True], lr=1e-3),
            torch.optim.AdamW(kinds[False], lr=1e-3, fused=True),
        ]
        self.scaler = torch.amp.GradScaler(device.type, init_scale=SCALE, growth_interval=2**30)
        self.scaler.scale(torch.ones((), device=device))

    @torch.no_grad()
    def __call__(self) -> None:
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            master.grad.copy_(
                gradient.view_as(master) if gradient.ndim < 3 else gradient.flatten(1)
            )
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(self.masters, MAX_NORM)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master.view_as(weight))


class Products:
    """The orthogonalization of our step alone."""

    def __init__(self, case: str, quick: bool, device: torch.device) -> None:
        from ampfuse.optim import muon

        self.orthogonalize, self.device = muon.orthogonalize, device
        self.jobs: dict[Any, list[Tensor]] = {}
        for is_matrix, _, gradient in tensors_of(case, quick, device):
            if is_matrix:
                view = gradient.permute(0, 2, 3, 1).flatten(1) if gradient.ndim == 4 else gradient
                self.jobs.setdefault(tuple(view.shape), []).append(view[None].contiguous())
        self.group = {
            "ns_coefficients": muon.JORDAN,
            "ns_steps": STEPS,
            "eps": 1e-7,
            "adjust_lr_fn": None,
        }

    def __call__(self) -> None:
        for views in self.jobs.values():
            self.orthogonalize((view.clone(), self.group) for view in views)

    def operations(self) -> tuple[float, float]:
        """torch's and ours, in 1e9, as if all were in one type."""
        from ampfuse.optim.newton_schulz import operations, product_dtype

        theirs, ours, dtype = 0.0, 0.0, product_dtype(self.device)
        for (rows, columns), views in self.jobs.items():
            m, n = min(rows, columns), max(rows, columns)
            theirs += len(views) * operations(m, n, STEPS, dtype, by_gram=False)
            ours += len(views) * operations(m, n, STEPS, dtype)
        return theirs / 1e9, ours / 1e9


class Peak:
    """As many operations as ours, as products of 1,024 x 1,024 in BF16."""

    def __init__(self, operations: float, device: torch.device) -> None:
        self.left, self.right = (
            torch.randn(8, 1024, 1024).to(device, torch.bfloat16) for _ in range(2)
        )
        self.times = operations * 1e9 / (8 * 2 * 1024**3)

    def milliseconds(self, clock: Clock) -> float:
        return self.times * clock.milliseconds(lambda: torch.bmm(self.left, self.right))


def main() -> None:
    """Measures the cases and writes the CSV."""
    options = options_of(__doc__, "muon")
    results = Results(options)
    with Worker(Clock, options.device) as worker:
        for case in filter(results.want, ("gpt2-small", "resnet18")):
            for threads in options.threads:
                torch.set_num_threads(threads)
                arguments = case, options.quick, options.device
                clock, products = Clock(options.device), Products(*arguments)
                theirs, ours = products.operations()
                print(f"{case}: {theirs:,.1f}e9 operations by torch's way, {ours:,.1f}e9 by ours")
                peak = Peak(ours, options.device)
                times = measure(
                    {
                        "ampfuse": Variant(clock, Ours(*arguments)),
                        "torch": worker.variant(Torchs, *arguments),
                        "products": Variant(clock, products),
                        "peak": lambda peak=peak, clock=clock: peak.milliseconds(clock),
                    },
                    options.repeats,
                )
                count = sum(math.prod(shape) for _, shape in shapes_of(case, options.quick))
                what = {"optimizer": "Muon", "dtype": "bf16", "does": "clip", "case": case}
                results.add(rows_of(options.device, times, params=count, **what))
                worker.clear()
    results.finish()


if __name__ == "__main__":
    main()
