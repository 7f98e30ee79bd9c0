"""What the environment report asks of torch and of the extension, each of which may crash.

Run by path in an interpreter of its own, before the package can be imported: so nothing of it is
imported up here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any

Facts = dict[str, Any]
# A section of the report, and what finds the facts in it.
Probe = tuple[str, Callable[[], Facts]]


def show(probes: Iterable[Probe]) -> None:
    """Print a section of the report for each, at once, in case the next crashes."""
    for section, probe in probes:
        print(section, flush=True)
        try:
            facts = probe()
        except Exception as error:  # whatever it is, the report goes on
            facts = {"probe": failure(error)}
        for key, value in facts.items():
            line = str(value).replace("\n", " ")
            print(f"  {key:<25}  {line}", flush=True)


def failure(error: BaseException) -> str:
    return f"FAILED: {type(error).__name__}: {error}"


def covering_arch(archs: Iterable[str], capability: tuple[int, int]) -> str | None:
    """Which of `archs` (``"sm_80"``, ``"compute_90"``) a GPU of `capability` runs; None if none.

    Machine code (sm) runs on GPUs of the same major version from its minor version on; PTX
    (compute) is compiled by the driver for any GPU from its version on; a letter at the end
    (``sm_90a``) ties code to that one architecture. Machine code is preferred, and the newest.
    """
    gpu = capability[0] * 10 + capability[1]
    best: tuple[bool, int, str] | None = None
    for arch in archs:
        matched = re.fullmatch(r"(sm|compute)_(\d+)([af]?)", arch)
        if not matched:
            continue
        kind, number, letter = matched[1], int(matched[2]), matched[3]
        if letter == "a":
            runs = number == gpu
        elif kind == "sm" or letter == "f":
            runs = number // 10 == capability[0] and number <= gpu
        else:
            runs = number <= gpu
        if runs:
            candidate = (kind == "sm", number, arch)
            best = candidate if best is None else max(best, candidate)
    return best[2] if best else None


def _torch() -> Facts:
    import torch

    found: Facts = {
        "running": str(torch.__version__),
        "CUDA build": torch.version.cuda or "no",
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "CUDA available": torch.cuda.is_available(),
    }
    if torch.cuda.is_available():
        found["cuDNN"] = torch.backends.cudnn.version()
    return found


def _extension() -> Facts:
    from ampfuse import _core

    C = _core.C
    archs = C.cuda_archs()
    forced = os.environ.get("AMPFUSE_CPU_ISA")
    return {
        "CUDA backend": f"yes: {' '.join(archs)}" if C.cuda_built() else "no",
        "CPU ISA": C.cpu_isa() + (f" (AMPFUSE_CPU_ISA={forced})" if forced else " (picked)"),
    }


def _gpus() -> Facts:
    import torch

    try:
        from ampfuse import _core

        archs = _core.C.cuda_archs()
    except ImportError:  # told in the section of the extension; the GPUs are there all the same
        archs = []
    found: Facts = {}
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(i)
        capability = (properties.major, properties.minor)
        arch = covering_arch(archs, capability)
        found[f"GPU {i}"] = (
            f"{properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.total_memory / 2**30:.1f} GiB: "
            + (f"runs ampfuse's {arch}" if arch else "NOT COVERED by what was built")
            + ("" if capability >= (8, 0) else "; BF16 is emulated")
        )
    return found or {"GPUs": "none that torch can use"}


def _steps() -> Facts:
    """One small AdamW step on each device: being loaded is not yet working."""
    import torch

    from ampfuse import _core, optim

    devices = ["cpu"]
    if _core.C.cuda_built() and torch.cuda.is_available():
        devices += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    found: Facts = {}
    for device in devices:
        try:
            weight = torch.ones(1000, device=device, requires_grad=True)
            weight.grad = torch.ones_like(weight)
            optim.AdamW([weight], lr=0.5, weight_decay=0.0).step()
            right = torch.allclose(weight.detach().cpu(), torch.full((1000,), 0.5))
            found[f"step on {device}"] = "works" if right else "runs, but gives a WRONG RESULT"
        except Exception as error:
            found[f"step on {device}"] = failure(error)
    return found


if __name__ == "__probe__":
    show((("torch", _torch), ("extension", _extension), ("GPUs", _gpus), ("steps", _steps)))
