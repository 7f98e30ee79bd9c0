"""How often a training step makes the host wait for the GPU.

    python benchmarks/syncs.py [--device cuda] [--csv FILE]

Trains a small network with FP16 autocast (BF16 on a CPU), a loss scaler and clipping, and counts in
the trace of torch.profiler, per step, once warm:

waits
    calls of the CUDA runtime that wait: cudaStreamSynchronize, cudaDeviceSynchronize and
    cudaEventSynchronize. 0 on a CPU, which has none.
copies
    memory copies from the device to the host: what is read there, the host waits for.
items
    values that Python or torch read from a tensor (``Tensor.item()``, ``float(tensor)``, ``if
    tensor``); on a GPU each is such a copy and such a wait. torch's optimizers keep step counts on
    the host, where they cost nothing, so a CPU trace shows more of them than a GPU's waits.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from harness import RESULTS, hardware, write
from torch.profiler import ProfilerActivity, profile, record_function

import ampfuse

_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_STEP = "training step"


@dataclass(frozen=True)
class Row:
    """Of one way to train; counts are per step."""

    variant: str
    waits: float
    copies: float
    items: float
    steps: int
    hardware: str
    torch: str
    ampfuse: str
    date: str


def _model(device: torch.device) -> torch.nn.Module:
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(8)]
    return torch.nn.Sequential(*layers).to(device)


def _autocast_step(
    device: torch.device, kind: type, scaler_kind: type, options: dict[str, bool]
) -> Callable[[], None]:
    """FP32 weights under autocast, with a scaler."""
    model, x = _model(device), torch.randn(32, 64, device=device)
    optimizer = kind(model.parameters(), **options)
    scaler = scaler_kind(device.type)
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        if isinstance(scaler, ampfuse.GradScaler):
            scaler.clip_grad_norm_(optimizer, 1.0)
        else:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def _amp_step(device: torch.device, level: str) -> Callable[[], None]:
    """``amp.initialize`` and ``scale_loss``, with dynamic loss scaling."""
    model, x = _model(device), torch.randn(32, 64, device=device)
    optimizer = ampfuse.optim.AdamW(model.parameters(), max_grad_norm=1.0)
    model, optimizer = ampfuse.amp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0
    )

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        with ampfuse.amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    return step


def ways(device: torch.device) -> dict[str, Callable[[], None]]:
    """Training steps by what their rows are called."""
    half, mixed = ("O2", "O1") if device.type == "cuda" else ("O5", "O4")
    adamw = torch.optim.AdamW
    return {
        f"ampfuse {half}": _amp_step(device, half),
        f"ampfuse {mixed}": _amp_step(device, mixed),
        "ampfuse GradScaler": _autocast_step(device, ampfuse.optim.AdamW, ampfuse.GradScaler, {}),
        "torch fused": _autocast_step(device, adamw, torch.amp.GradScaler, {"fused": True}),
        "torch foreach": _autocast_step(device, adamw, torch.amp.GradScaler, {"foreach": True}),
    }


def count(step: Callable[[], None], device: torch.device, steps: int) -> tuple[float, ...]:
    """Waits, copies to the host and items of one step, the mean of `steps`."""
    for _ in range(3):
        step()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    with profile(activities=activities) as trace:
        for _ in range(steps):
            with record_function(_STEP):
                step()
    events = list(trace.events())
    # Only what is called inside the steps: the profiler waits for the device at its end.
    inside = [event.time_range for event in events if event.name == _STEP]

    def called(*names: str) -> int:
        starts = [event.time_range.start for event in events if event.name in names]
        return sum(any(step.start <= at <= step.end for step in inside) for at in starts)

    copies = sum("Memcpy DtoH" in event.name for event in events)  # made on the device, later
    counts = called(*_WAITS), copies, called("aten::_local_scalar_dense")
    return tuple(number / steps for number in counts)


def main() -> None:
    """Counts for each way and writes the CSV."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--csv", type=Path, help="benchmarks/results/syncs_<device>.csv")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = []
    for name, step in ways(device).items():
        waits, copies, items = count(step, device, options.steps)
        print(f"{name:20s} per step: {waits:g} waits, {copies:g} copies to host, {items:g} items")
        rows.append(
            Row(
                variant=name,
                waits=waits,
                copies=copies,
                items=items,
                steps=options.steps,
                hardware=hardware(device),
                torch=torch.__version__,
                ampfuse=ampfuse.__version__,
                date=datetime.date.today().isoformat(),
            )
        )
    path = options.csv or RESULTS / f"syncs_{device.type}.csv"
    write(path, rows)
    print(f"{len(rows)} rows in {path}")


if __name__ == "__main__":
    main()
