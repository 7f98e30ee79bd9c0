"""The results of training, to the last bit: a SHA-256 for each of a fixed set of runs.

    python tests/bits.py            prints a line per run: ISA, threads, backend, run, hash
    python tests/bits.py --write    writes the hashes to tests/data/bits.json

A hash covers everything that a training leaves behind: weights, masters, optimizer states, loss
scales, gradients, and the norm and skip decision of each step. A change of the code that is meant
to change no result leaves every hash as it is; ``test_bits.py`` compares them. The script also runs
on an older version (``PYTHONPATH=<its python folder>``).

The instruction set, the number of threads and the backend have no part in a hash; nor should torch
and the machine. So all inputs come from integer arithmetic, and what torch computes here is exact
in every type (products and short sums of small integers): no order of summation matters. The
trainings use public names, for older versions; of private ones they need those that this file,
cases.py and programs.py import.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import unittest.mock
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ampfuse
from ampfuse import _core, amp, ops, optim
from ampfuse.compat import apex
from cases import (
    ISAS,
    KINDS,
    LEVELS,
    MODES,
    OPTIMIZERS,
    bf16,
    clean_apex_names,
    digest,
    emulated_module,
    f16,
    f32,
    fractions,
    has_mode,
    integers,
    make,
    nn_ops,
    with_whole_masters,
)
from programs import python

FILE = Path(__file__).parent / "data" / "bits.json"
STEPS = 6
INIT_SCALE = 2.0**10
TRUST = 1e-3  # so small that LARC lowers the rates of some tensors


# ---- a model whose gradients are exact -----------------------------------------------------------


class Net(nn.Module):
    """Layers side by side, each with an input of its own; one of each kind that amp treats."""

    SHAPES = ((1, 9), (1, 7), (1, 2, 5, 5), (1, 33))

    def __init__(self, wide: int = 60) -> None:
        super().__init__()
        self.wide = nn.Linear(9, wide)
        self.narrow = nn.Linear(7, 3)
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm1d(33)  # stays FP32 at O2 and O5
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(fractions(tuple(parameter.shape), i))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        wide, narrow, conv, norm = inputs
        weighted = norm * self.norm.weight + self.norm.bias
        return self.wide(wide), self.narrow(narrow), self.conv(conv), weighted

    def loss(self, seed: int, without: int | None = None, infinite: bool = False) -> Tensor:
        """Its gradients are products of small integers, and of 1/64.

        Args:
            without: this layer takes no part, so that its gradients stay None.
            infinite: one gradient of the last layer is infinite.
        """
        inputs = [integers(shape, seed + i, 3) for i, shape in enumerate(self.SHAPES)]
        inputs[-1][0, 0] = 1.0
        total = torch.zeros(())
        for i, output in enumerate(self(*inputs)):
            factors = integers(tuple(output.shape), seed + 10 + i, 7) / 64
            if infinite and i == 3:
                factors[0, 0] = float("inf")
            if i != without:
                total = total + (output.float() * factors).sum()
        return total


class Foreign(torch.optim.Optimizer):
    """An optimizer that ampfuse does not know, so that its own step runs, on masters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["sum"] = state.get("sum", torch.zeros_like(param)) * 0.5 + param.grad
                    param.sub_(state["sum"] * group["lr"])


MAKERS = {
    **{name: partial(make, name) for name in KINDS},
    "torch.optim.SGD": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "torch.optim.AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "LARC(torch.optim.SGD)": lambda p: optim.LARC(torch.optim.SGD(p, lr=1e-2, momentum=0.9), TRUST),
    "LARS(adamw)": lambda p: optim.LARC(make("adamw", p), TRUST, clip=False),
    "foreign": partial(Foreign, lr=1e-2),
    "LARC(foreign)": lambda p: optim.LARC(Foreign(p, lr=1e-2), TRUST),
}


def groups(model: Net) -> list[dict[str, Any]]:
    """Weights and the rest, each with a learning rate of its own."""
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if "wide" in name or "conv" in name]},
        {"params": [p for name, p in named if "narrow" in name or "norm" in name], "lr": 2.0**-6},
    ]


def decision_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    last = getattr(optimizer, "last_step", None)
    if last is None:
        return {}
    norm = last.grad_norm
    return {"norm": torch.tensor(torch.nan) if norm is None else norm, "skipped": last.skipped}


def final_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State dicts first: looking at masters or gradients may compute some."""
    state = with_whole_masters(optimizer)
    tensors = {
        "state_dict": model.state_dict(),
        "optimizer": state["state"],
        "lr": [group["lr"] for group in state["param_groups"]],
        "weights": [p.detach().clone() for p in model.parameters()],
        "masters": [p.detach().clone() for p in amp.master_params(optimizer)],
    }
    # The sign of torch's zeros depends on the CPU.
    for name, params in (("", model.parameters()), (" of masters", amp.master_params(optimizer))):
        tensors[f"gradients{name}"] = [None if p.grad is None else p.grad + 0 for p in params]
    return tensors


# ---- the runs ------------------------------------------------------------------------------------


class Training:
    """``Net`` at a level, with a step for everything that happens in a training."""

    def __init__(self, level: str, name: str, clip: str = "amp", wide: int = 60, **options: Any):
        self.model = Net(wide)
        self.optimizer = MAKERS[name](groups(self.model))
        self.clip = clip
        options = {"init_scale": INIT_SCALE, "growth_interval": 2, "verbosity": 0, **options}
        amp.initialize(self.model, self.optimizer, opt_level=level, **options)
        scale = options.get("loss_scale", "dynamic" if level in ("O1", "O2") else 1.0)
        self.dynamic = scale == "dynamic"
        self.optimizer.skip_nonfinite = False  # norms of uninspected steps have a hash, too

    def train(self, steps: range) -> list[dict[str, Any]]:
        """Norm and skip decision of each step."""
        return [self.step(step) for step in steps]

    def step(self, step: int) -> dict[str, Any]:
        model, optimizer = self.model, self.optimizer
        optimizer.zero_grad()
        for part in range(2 if step == 3 else 1):  # accumulation
            loss = model.loss(
                7 * step + part,
                without=1 if step == 1 else None,
                infinite=self.dynamic and step == 4,
            )
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        if self.clip == "amp" and step in (2, 4, 5):
            amp.clip_grad_norm_(optimizer, 0.5)
        elif self.clip == "by hand" and step in (2, 3, 5):
            for param in amp.master_params(optimizer):
                if param.grad is not None:
                    param.grad.mul_(0.75)
        optimizer.step()
        if step == 2:  # an edit, which masters follow
            with torch.no_grad():
                model.narrow.weight[0] = 0.5
        return decision_of(optimizer)

    def state(self) -> dict[str, Any]:
        return {"amp": amp.state_dict(), **final_state(self.model, self.optimizer)}


def at_a_level(*arguments: Any, **options: Any) -> dict[str, Any]:
    training = Training(*arguments, **options)
    return {"steps": training.train(range(STEPS)), **training.state()}


def several_losses(level: str) -> dict[str, Any]:
    """Two models and optimizers, two losses with scales of their own."""
    models = [Net(), Net()]
    optimizers = [make("adamw", models[0].parameters()), make("sgd-all", models[1].parameters())]
    options = {"init_scale": INIT_SCALE, "growth_interval": 2, "verbosity": 0}
    amp.initialize(models, optimizers, opt_level=level, num_losses=2, **options)
    for optimizer in optimizers:
        optimizer.skip_nonfinite = False
    steps = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with amp.scale_loss(models[0].loss(step), optimizers[0], loss_id=0) as scaled:
            scaled.backward()
        infinite = step == 3 and level in ("O1", "O2")
        loss = models[0].loss(step + 50) + models[1].loss(step + 100, infinite=infinite)
        with amp.scale_loss(loss, optimizers, loss_id=1) as scaled:
            scaled.backward()
        for optimizer in optimizers:
            optimizer.step()
            steps.append(decision_of(optimizer))
    ends = [final_state(*pair) for pair in zip(models, optimizers, strict=True)]
    return {"steps": steps, "amp": amp.state_dict(), "ends": ends}


class Parameters(nn.ParameterList):
    """Tensors of all types, one longer than two chunks of a reduction."""

    def __init__(self, dtypes: tuple[torch.dtype, ...], largest: int, third: int = 2100) -> None:
        shapes = ((5, 31), (1,), (third,), (0,), (largest,), (17, 3), (16,))
        dtype = [dtypes[i % len(dtypes)] for i in range(len(shapes))]
        super().__init__(
            nn.Parameter(fractions(shape, i).to(dtype[i])) for i, shape in enumerate(shapes)
        )

    def loss(self, seed: int, infinite: bool = False) -> Tensor:
        total = torch.zeros(())
        for i, param in enumerate(self):
            factors = integers(tuple(param.shape), seed + i, 63) / 64
            if infinite and i == 2:
                factors[9] = float("inf")
            if i != seed % 5:
                total = total + (param.float() * factors).sum()
        return total


def with_scaler(
    name: str,
    *,
    dtypes: tuple[torch.dtype, ...] = (f32, f16, bf16),
    largest: int = 300,
    third: int = 2100,
    unscale: bool = False,
    larc: dict[str, Any] | None = None,
    halved: bool = False,
    meter: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """An optimizer of ampfuse's under its GradScaler."""
    params = Parameters(dtypes, largest, third)
    optimizer = make(name, list(params), **options)
    if larc is not None:
        optimizer = optim.LARC(optimizer, TRUST, **larc)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step) if halved else None
    if meter:
        optimizer.meter(every=1, changed_bits=True)
    scaler = ampfuse.GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=2)
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(params.loss(step, infinite=step == 3)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        if step in (1, 2):
            scaler.clip_grad_norm_(optimizer, 0.5)
        scaler.step(optimizer)
        scaler.update()
        if rates is not None and not optimizer.last_step.skipped:
            rates.step()
        steps.append({**decision_of(optimizer), "scale": scaler.get_scale()})
    if halved:  # the hashes are of the groups as they began
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"]
    results = {"steps": steps, "scaler": scaler.state_dict(), **final_state(params, optimizer)}
    if meter:
        results["readings"] = [str(reading) for reading in optimizer.meter.readings]
        names = dict.fromkeys(reading.parameter for reading in optimizer.meter.readings)
        results["changed"] = [optimizer.meter.changed(name).to(torch.uint8) for name in names]
    return results


def without_scaler(name: str, *, infinite: bool = False, **options: Any) -> dict[str, Any]:
    """An optimizer of ampfuse's without scaler, with a closure."""
    params = Parameters((f16, f32, bf16), 300)
    optimizer = make(name, list(params), **{"skip_nonfinite": False, **options})
    steps = []
    for step in range(4):

        def closure(step=step):
            optimizer.zero_grad()
            loss = params.loss(step, infinite=infinite and step == 2)
            loss.backward()
            return loss

        optimizer.step(closure)
        steps.append(decision_of(optimizer))
    return {"steps": steps, **final_state(params, optimizer)}


def by_apex_names(level: str, name: str) -> dict[str, Any]:
    options = {"momentum": 0.9, "lr": 1e-2} if name == "FusedSGD" else {"lr": 1e-2}
    with clean_apex_names():
        model = Net()
        optimizer = getattr(apex.optimizers, name)(groups(model), **options)
        model, optimizer = apex.amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for step in range(4):
            optimizer.zero_grad()
            loss = model.loss(step) / 2**6
            with apex.amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        return {"amp": apex.amp.state_dict(), **final_state(model, optimizer)}


def fp16_optimizer(dynamic: bool) -> dict[str, Any]:
    model = Net().half()
    inner = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    optimizer = apex.fp16_utils.FP16_Optimizer(
        inner,
        static_loss_scale=8.0,
        dynamic_loss_scale=dynamic,
        dynamic_loss_args={"init_scale": INIT_SCALE, "scale_window": 2},
        verbose=False,
    )
    for step in range(4):
        optimizer.zero_grad()
        inputs = [integers(shape, step + i, 3).half() for i, shape in enumerate(Net.SHAPES)]
        outputs = model(*inputs)
        loss = torch.stack([(o.float() / 64).sum() for o in outputs]).sum()
        optimizer.backward(loss * float("inf") if dynamic and step == 2 else loss)
        optimizer.step()
    masters = [p for group in optimizer.fp32_from_fp16_groups for p in group]
    return {"scale": optimizer.loss_scale, "masters": masters, "weights": list(model.parameters())}


def operations() -> dict[str, Any]:
    """``ampfuse.ops``, in and out of all types."""
    shapes = [(n,) for n in (0, 1, 15, 16, 33, 2049, 40000)]
    types = (f32, f16, bf16)
    x = [fractions(shape, i).to(t) for i, shape in enumerate(shapes) for t in types]
    y = [fractions(shape, i + 50).to(t) for i, shape in enumerate(shapes) for t in types]
    norm, norms = ops.l2norm(x, per_tensor=True)
    results: dict[str, Any] = {"norm": norm, "norms": norms}
    for name, call in {
        "scale": lambda out, flag: ops.scale(x, out, 1 / 3, flag),
        "axpby": lambda out, flag: ops.axpby(x, y, out, 1 / 3, -7.0, flag),
        "unscale": lambda out, flag: ops.unscale(x, out, torch.tensor(1 / 3), flag),
        "copy": lambda out, flag: ops.copy(x, out),
    }.items():
        out, flag = [t.to(types[i % 2]) for i, t in enumerate(y)], torch.zeros(1)
        call(out, flag)
        results[name] = [out, flag]
    return results


def batch_norm(dtype: torch.dtype) -> dict[str, Any]:
    """Forward and backward of the fused batch norm: widths around a vector's, rows around a tile's
    and a span's, two users."""
    act = nn_ops().batch_norm_act
    results = {}
    for channels, height in itertools.product((3, 16, 65, 150), (4, 23)):
        shape = (2, height, height, channels)
        x, residual, dy = (
            fractions(shape, seed).to(dtype).permute(0, 3, 1, 2).requires_grad_(seed < 2)
            for seed in range(3)
        )
        weight, bias = (fractions((channels,), seed).requires_grad_() for seed in (3, 4))
        running = [fractions((channels,), 5), fractions((channels,), 6) + 1]
        y = act(x, residual, weight, bias, *running, True, 0.1, 1e-5, True)
        out = act(y, None, weight, bias, *running, False, 0.1, 1e-5, False)
        # The users' gradients are the factors, whatever torch's sum is.
        ((out * dy).sum() + (out * dy).sum()).backward()
        grads = [t.grad for t in (x, residual, weight, bias)]
        results[f"{channels} {height}"] = [y.detach(), *running, *grads]
    return results


def outputs_and_gradients(outputs: Any, gradients: Any, *inputs: Tensor | None) -> list[Tensor]:
    """The outputs, and the gradients of those inputs that are there."""
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    input_gradients = torch.autograd.grad(outputs, [t for t in inputs if t is not None], gradients)
    return [*(t.detach() for t in outputs), *input_gradients]


def cross_entropy(dtype: torch.dtype) -> dict[str, Any]:
    """Classes around a vector's width, the lanes' and a span's."""
    by_case = {}
    for classes, smoothing in itertools.product((1, 17, 129, 4097, 9000), (0.0, 0.1)):
        logits = (8 * fractions((5, classes), classes)).to(dtype).requires_grad_()
        target = torch.tensor([0, classes - 1, -100, classes // 2, 0])
        weight = integers((classes,), 1, 3) + 3 if smoothing else None
        losses = nn_ops().cross_entropy(logits, target, weight, -100, smoothing)
        by_case[f"{classes} {smoothing}"] = outputs_and_gradients(
            losses, fractions((5,), 2), logits
        )
    return by_case


def norm(dtype: torch.dtype) -> dict[str, Any]:
    """Columns around a vector's width, the lanes' and a span's."""
    by_case = {}
    for columns, centered in itertools.product((1, 17, 129, 1025, 3000), (True, False)):
        x, residual, *gradients = (
            fractions((37, columns), seed).to(dtype).requires_grad_(seed < 2) for seed in range(4)
        )
        weight = fractions((columns,), 4).requires_grad_()
        bias = fractions((columns,), 5).requires_grad_() if centered else None
        outputs = nn_ops().norm(x, residual, [columns], weight, bias, 1e-5, centered)
        by_case[f"{columns} {centered}"] = outputs_and_gradients(
            outputs, gradients, x, weight, bias
        )
    return by_case


def activation(dtype: torch.dtype) -> dict[str, Any]:
    """Columns around a vector's width, rows around a span's."""
    by_case = {}
    for columns, name in itertools.product((1, 17, 150), ("gelu", "gelu_tanh", "silu")):
        x, up, dy = (
            (4 * fractions((519, columns), seed)).to(dtype).requires_grad_(seed < 2)
            for seed in range(3)
        )
        bias = fractions((columns,), 3).requires_grad_()
        for case, others in (("plain", (None, None)), ("gated", (up, bias))):
            y = nn_ops().activation(x, *others, name)
            by_case[f"{columns} {name} {case}"] = outputs_and_gradients(y, dy, x, *others)
    return by_case


def registered_runs() -> dict[str, Callable[[], Any]]:
    """All trainings and operations by name."""
    runs: dict[str, Callable[[], Any]] = {}

    def add(name: str, run: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        runs[name] = partial(run, *arguments, **options)

    for level in LEVELS:
        for name in MAKERS:
            add(f"amp {level} {name}", at_a_level, level, name)
        add(f"amp {level} several losses", several_losses, level)
        for name in ("adamw", "foreign"):
            add(f"amp {level} {name} rewritten gradients", at_a_level, level, name, clip="by hand")
    for level, name in (("O1", "sgd-all"), ("O2", "adamw"), ("O5", "lamb")):
        add(f"amp {level} {name} large", at_a_level, level, name, wide=4000)
    for title, level, options in (
        ("dynamic scale", "O5", {"loss_scale": "dynamic", "hysteresis": 2}),
        ("static scale", "O2", {"loss_scale": 128.0}),
        ("batch norm in FP16", "O2", {"keep_batchnorm_fp32": False}),
    ):
        add(f"amp {level} adamw {title}", at_a_level, level, "adamw", **options)
    for name in OPTIMIZERS:
        add(f"scaler {name} masters", with_scaler, name, master_weights=True)
        add(f"alone {name}", without_scaler, name)
    for name in KINDS:
        for title, options in {
            "no masters": {},
            "unscaled": {"master_weights": True, "unscale": True},
            "gradients left scaled": {"master_weights": True, "unscale_grads": False},
            "large": {"master_weights": True, "largest": 70001},
            "FP32": {"dtypes": (f32,), "max_grad_norm": 1.0},
            "schedule": {"master_weights": True, "halved": True},
            "metered": {"master_weights": True, "largest": 70001, "meter": True},
        }.items():
            add(f"scaler {name} {title}", with_scaler, name, **options)
        skipping = {"skip_nonfinite": True, "max_grad_norm": 0.5, "infinite": True}
        add(f"alone {name} skipping", without_scaler, name, master_weights=True, **skipping)
        for title, options in MODES.items():
            if has_mode(name, title):
                add(
                    f"scaler {name} {title}",
                    with_scaler,
                    name,
                    largest=33001,
                    third=4300,
                    **options,
                )
    for level, name in itertools.product(("O2", "O5"), ("adamw", "lamb", "LARC(torch.optim.SGD)")):
        options = {"master_weights": "split", "clip": "by hand"}
        add(f"amp {level} {name} split", at_a_level, level, name, **options)
    for name, clip in itertools.product(("sgd-all", "adamw-all", "adagrad-all"), (True, False)):
        larc = {"larc": {"clip": clip}, "master_weights": True}
        add(f"scaler LARC {name} clip {clip}", with_scaler, name, **larc)
    fused_by_apex = "Adagrad Adam LAMB MixedPrecisionLamb NovoGrad SGD"
    for name, level in itertools.product(fused_by_apex.split(), ("O0", "O1", "O2")):
        name = f"Fused{name}"
        if not (name == "FusedMixedPrecisionLamb" and level == "O2"):
            add(f"apex {level} {name}", by_apex_names, level, name)
    for dynamic in (False, True):
        add(f"apex FP16_Optimizer dynamic {dynamic}", fp16_optimizer, dynamic)
    add("ops", operations)
    for dtype in (f32, f16, bf16):
        add(f"batch norm {dtype}", batch_norm, dtype)
        add(f"cross entropy {dtype}", cross_entropy, dtype)
        add(f"norm {dtype}", norm, dtype)
        add(f"activation {dtype}", activation, dtype)
    return runs


# ---- the program ---------------------------------------------------------------------------------


def hashes(without_levels: bool = False) -> dict[str, str]:
    """The hash of each run, with the instruction set, threads and backend in force; or of those
    without a level, which call every kernel."""
    runs = registered_runs()
    if without_levels:
        runs = {name: runs[name] for name in runs if not name.startswith(("amp ", "apex "))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: digest(run()) for name, run in runs.items()}


def hashes_of(isa: str, threads: int, without_levels: bool = False) -> dict[str, str]:
    """The same with this instruction set and number of threads, from a process of its own."""
    options = ["--without-levels"] if without_levels else []
    child = python(__file__, "--threads", threads, *options, AMPFUSE_CPU_ISA=isa)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    parser.add_argument("--threads", type=int, help="the hashes with so many threads, as JSON")
    parser.add_argument("--without-levels", action="store_true", help="the kernels alone")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads or 1)
    if arguments.threads:
        print(json.dumps(hashes(arguments.without_levels)))
        return
    hashes_by_run = {}
    for isa, threads in itertools.product(ISAS[_core.C.cpu_isa()], (1, 2)):
        hashes_by_run[f"{isa} {threads} cpu"] = hashes_of(isa, threads)
    with unittest.mock.patch.object(_core, "C", emulated_module()):
        hashes_by_run["emulated 1 cuda"] = hashes()
    for where, runs in hashes_by_run.items():
        for name, hashed in runs.items():
            print(f"{where:<16} {name:<40} {hashed}")
    first, *others = hashes_by_run.values()
    if any(other != first for other in others):
        sys.exit("The hashes depend on the instruction set, the threads or the backend.")
    if arguments.write:
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(first, indent=1) + "\n")


if __name__ == "__main__":
    main()
