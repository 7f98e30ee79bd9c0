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
_NO_BF16 = "; BF16 is emulated: use O1 or O2"
# A section of the report, and what finds the facts in it.
Probe = tuple[str, Callable[[], Facts]]


def show(probes: Iterable[Probe]) -> None:
    """Print a section of the report for each, at once, in case the next crashes."""
    for section, probe in probes:
        print(section, flush=True)
        try:
            facts = probe()
        except Exception as error:  # whatever it is, the report goes on
            facts = {"probe": f"FAILED: {type(error).__name__}: {error}"}
        for key, value in facts.items():
            line = str(value).replace("\n", " ")
            print(f"  {key:<25}  {line}", flush=True)


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

    return {
        "running": str(torch.__version__),
        "built for": _platform(),
        "threads": torch.get_num_threads(),
        "CUDA available": "yes" if torch.cuda.is_available() else "no",
    }


def _platform() -> str:
    """What torch is built for."""
    import torch

    if torch.version.hip or torch.version.cuda:
        return f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    device = torch.accelerator.current_accelerator()
    return "CPUs" if device is None else device.type.upper()


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

    found: Facts = {}
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(i)
        arch, problem = _arch_or_problem(i)
        found[f"GPU {i}"] = (
            f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB: "
            + (f"NOT USED: {problem}" if problem else f"runs ampfuse's {arch}")
            + ("" if problem else "; use O4 or O5" if properties.major >= 8 else _NO_BF16)
        )
    if not found:
        try:
            torch.cuda.init()
            why = "CUDA_VISIBLE_DEVICES may hide them"
        except Exception as error:  # torch's own words for a driver that is missing or too old
            why = str(error)
        found["GPUs"] = f"none that torch can use: {_other_build() or why}"
    return found


def _other_build() -> str | None:
    """Why no GPU can be used, and what to do, if torch is not a CUDA build; None if it is."""
    if (platform := _platform()).startswith("CUDA"):
        return None
    kernels = "ampfuse has kernels for NVIDIA GPUs and CPUs"
    return (
        f"torch is built for {platform}, and {kernels}: install a CUDA build, or train on the CPU"
    )


def _arch_or_problem(i: int) -> tuple[str | None, str | None]:
    """Which of ampfuse's architectures the GPU `i` of torch runs; or why none, and what to do."""
    import torch

    if problem := _other_build():
        return None, problem
    try:
        from ampfuse import _core
    except ImportError as error:
        return None, str(error)
    archs, (major, minor) = _core.C.cuda_archs(), torch.cuda.get_device_capability(i)
    if arch := covering_arch(archs, (major, minor)):
        return arch, _core.driver_problem(*_core.C.cuda_versions())
    return None, (
        f"it is sm_{major}{minor}, but ampfuse was built for {' '.join(archs) or 'CPUs'}; use such "
        "a GPU, or compile ampfuse with an nvcc that supports this one: AMPFUSE_CUDA=ON pip "
        "install --force-reinstall --no-deps --no-binary ampfuse ampfuse"
    )


if __name__ == "__probe__":
    show((("torch", _torch), ("extension", _extension), ("GPUs", _gpus)))
