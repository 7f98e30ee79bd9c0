"""What the environment report asks of torch and of the extension, each of which may crash.

Neither is imported up here, so that a section says why it cannot be.
"""

from __future__ import annotations

import os
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


def _torch() -> Facts:
    import torch

    from ampfuse import devices

    return {
        "running": str(torch.__version__),
        "built for": devices.built_for(),
        "threads": torch.get_num_threads(),
        "CUDA available": "yes" if torch.cuda.is_available() else "no",
    }


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

    from ampfuse import devices

    found: Facts = {}
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(i)
        size = f"{properties.total_memory / 2**30:.1f} GiB"
        found[f"GPU {i}"] = f"{properties.name}, {size}: {_verdict(torch.device('cuda', i))}"
    if not found:
        found["GPUs"] = f"none that torch can use: {_why_none(devices.built_for())}"
    return found


def _verdict(device: Any) -> str:
    """Whether ampfuse uses a GPU, and at which levels; or why not, and what to do."""
    import torch

    from ampfuse import devices

    try:
        from ampfuse import _core

        problem = devices.device_problem(device)
    except ImportError as error:
        problem = str(error)
    if problem:
        return f"NOT USED: {problem}"
    capability = torch.cuda.get_device_capability(device)
    arch = devices.covering_arch(_core.C.cuda_archs(), capability)
    return f"runs ampfuse's {arch}{'; use O4 or O5' if capability >= (8, 0) else _NO_BF16}"


def _why_none(built_for: str) -> str:
    import torch

    from ampfuse import devices

    if built_for == "CPUs":
        return "torch is built for CPUs; for a GPU, install a CUDA build of torch"
    if not built_for.startswith("CUDA"):
        return devices.no_kernels_for(built_for)
    try:
        torch.cuda.init()
    except Exception as error:  # torch's own words for a driver that is missing or too old
        return str(error)
    return "CUDA_VISIBLE_DEVICES may hide them"


def show_all() -> None:
    """Print the sections. Called in an interpreter of its own."""
    show((("torch", _torch), ("extension", _extension), ("GPUs", _gpus)))
