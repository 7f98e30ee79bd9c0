"""Print what a bug report needs: versions, what was built, and whether it fits this machine.

It has to run where the rest does not. So it uses the standard library alone, every probe may fail
without stopping the others, and torch and the extension are looked at from a child process: the
report survives their crash."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

import ampfuse
from ampfuse.hardware import core_count, cpu_flags, cpu_has_bf16, cpu_model, nvidia_driver

_PACKAGES = ("torch", "numpy", "scikit-learn", "matplotlib", "triton")
# Instruction sets that ampfuse or torch picks code by, in Linux's names.
_X86_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")
_ARM_FLAGS = ("asimd", "fphp", "asimdhp", "bf16", "sve")
_VARIABLES = ("AMPFUSE_", "ATEN_", "CUDA", "LD_", "MKL_", "OMP_", "ONEDNN_", "PYTORCH_", "TORCH_")
_PATIENCE_S = 120.0
_NO_BF16 = "; BF16 is emulated: use O1 or O2"

Facts = dict[str, Any]
# A section of the report, and what finds the facts in it.
Probe = tuple[str, Callable[[], Facts]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no arguments."""


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Print the report and return the exit status. It takes seconds, most of them for torch."""
    show(_HERE)
    sys.stdout.flush()
    # Under this name the package imports neither torch nor the extension.
    code = "import sys; sys.argv[:] = 'ampfuse', 'env'"
    code += f"; from {__name__} import show_torch; show_torch()"
    try:
        # Warnings of the libraries go to stderr, which is shown only if the child crashes.
        child = subprocess.run(
            [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=_PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        print(f"  DIED: no answer in {_PATIENCE_S:.0f} s")
        return 0
    if status := child.returncode:
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        print(" ".join([f"  DIED: {how}.", *child.stderr.strip().splitlines()[-1:]]))
    return 0


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


# --- sections of this process, which imports neither torch nor the extension ---------------------


def _installation() -> Facts:
    facts: Facts = {"path": os.path.dirname(os.path.abspath(ampfuse.__file__))}
    try:
        from ampfuse import _build_info
    except ImportError:
        return {**facts, "built": "no: this source tree has not been installed"}
    return {
        **facts,
        "version": _build_info.VERSION,
        "built for torch": ", ".join(_build_info.TORCH_VERSIONS),
        "tested with torch": " to ".join(_build_info.TORCH_TESTED),
        "built as": _build_info.BUILD_INFO,
        "CUDA at build time": _build_info.CUDA_NOTE,
    }


def _system() -> Facts:
    flags = [flag for flag in _X86_FLAGS + _ARM_FLAGS if flag in cpu_flags()]
    return {
        "kernel": platform.platform(),
        "CPU": cpu_model(),
        "CPU cores": f"{core_count()} usable of {os.cpu_count()}",
        "CPU features": ", ".join(flags) or "unknown",
        "CPU levels": f"O4 and O5 {'are fast' if cpu_has_bf16() else 'save memory, not time'}",
        "NVIDIA driver": nvidia_driver() or "none found",
    }


def _python() -> Facts:
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        **{package: _version(package) for package in _PACKAGES},
    }


def _variables() -> Facts:
    set_here = sorted(name for name in os.environ if name.startswith(_VARIABLES))
    return {name: os.environ[name] for name in set_here} or {"relevant ones": "none set"}


_HERE: tuple[Probe, ...] = (
    ("ampfuse", _installation),
    ("system", _system),
    ("python", _python),
    ("variables", _variables),
)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except Exception:  # a damaged metadata folder raises all sorts of things
        return "not installed"


# --- sections of the child process: each imports torch itself, and so reports why it cannot ------


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

    facts: Facts = {}
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(i)
        size = f"{properties.total_memory / 2**30:.1f} GiB"
        facts[f"GPU {i}"] = f"{properties.name}, {size}: {_gpu_status(torch.device('cuda', i))}"
    if not facts:
        facts["GPUs"] = f"none that torch can use: {_why_no_gpu(devices.built_for())}"
    return facts


def _gpu_status(device: Any) -> str:
    """Say whether ampfuse uses a GPU, and at which levels; or why not, and what to do."""
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


def _why_no_gpu(built_for: str) -> str:
    import torch

    from ampfuse import devices

    if built_for == "CPUs":
        return "torch is built for CPUs; for a GPU, install a CUDA build of torch"
    if not built_for.startswith("CUDA"):
        return devices.no_kernels_for(built_for)
    try:
        torch.cuda.init()
    except Exception as error:  # torch's own message for a driver that is missing or too old
        return str(error)
    return "CUDA_VISIBLE_DEVICES may hide them"


def show_torch() -> None:
    """Print these sections. Called in the child process."""
    show((("torch", _torch), ("extension", _extension), ("GPUs", _gpus)))
