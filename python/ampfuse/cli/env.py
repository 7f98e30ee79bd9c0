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
from importlib import metadata

import ampfuse
from ampfuse.cli import env_probes
from ampfuse.cli.env_probes import Facts, Probe, show
from ampfuse.hardware import core_count, cpu_flags, cpu_has_bf16, cpu_model, nvidia_driver

_PACKAGES = ("torch", "numpy", "scikit-learn", "matplotlib", "rich", "triton")
# What ampfuse or torch picks code by, in Linux's names.
_X86_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")
_ARM_FLAGS = ("asimd", "fphp", "asimdhp", "bf16", "sve")
_VARIABLES = ("AMPFUSE_", "ATEN_", "CUDA", "LD_", "MKL_", "OMP_", "ONEDNN_", "PYTORCH_", "TORCH_")
_PATIENCE_S = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Print the report and return the exit status. It takes seconds, most of them for torch."""
    show(_HERE)
    sys.stdout.flush()
    # Under this name the package imports neither torch nor the extension.
    code = "import sys; sys.argv[:] = 'ampfuse', 'env'"
    code += f"; from {env_probes.__name__} import show_all; show_all()"
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


# Nothing here imports torch or the extension.


def _installation() -> Facts:
    found: Facts = {"path": os.path.dirname(os.path.abspath(ampfuse.__file__))}
    try:
        from ampfuse import _build_info
    except ImportError:
        return {**found, "built": "no: this source tree has not been installed"}
    return {
        **found,
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
