"""The CPU of this machine, its cores and its NVIDIA driver, without torch."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable

# AMD's generation by family and model: in a virtual machine the name is always "AMD EPYC".
_ZEN: dict[int, Callable[[int], str]] = {
    25: lambda model: "Zen 4" if model >> 4 in (1, 6, 7, 10) else "Zen 3",
    26: lambda model: "Zen 5",
}


def cpu_model() -> str:
    """The name of the CPU, as ``"Intel(R) Xeon(R) Platinum 8480+"`` or ``"AMD EPYC (Zen 5)"``."""
    info = _cpuinfo()
    name = info.get("model name") or platform.processor() or platform.machine()
    family, model = int(info.get("cpu family", 0)), int(info.get("model", 0))
    if info.get("vendor_id") == "AuthenticAMD" and family in _ZEN:
        name += f" ({_ZEN[family](model)})"
    return name


def cpu_flags() -> frozenset[str]:
    """The instruction sets of the CPU, in Linux's names; empty if that is unknown."""
    info = _cpuinfo()
    return frozenset((info.get("flags") or info.get("Features") or "").split())


def core_count() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_has_bf16() -> bool:
    """Whether the CPU has BF16 products (AMX, AVX512-BF16, ARM's BF16)."""
    return not cpu_flags().isdisjoint(("amx_bf16", "avx512_bf16", "bf16"))


def nvidia_driver() -> str | None:
    """The driver's version, as ``"580.82.07"``; None if there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None


def _cpuinfo() -> dict[str, str]:
    """The first processor's entries of /proc/cpuinfo; empty if there is no such file."""
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
