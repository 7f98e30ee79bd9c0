"""Where a result comes from: device, versions, the state of the sources, the kernels used."""

from __future__ import annotations

import contextlib
import functools
import platform
import re
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import ampfuse
from ampfuse import hardware
from ampfuse.devices import device_name
from ampfuse.measuring import silent_stderr


@functools.cache
def facts(device: torch.device) -> dict[str, dict[str, Any]]:
    """The fields ``device`` and ``environment`` of a result, which are the same for a command's."""
    return {"device": _device(device), "environment": _environment()}


def _device(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "type": "cuda",
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "count": torch.cuda.device_count(),
        }
    return {
        "type": "cpu",
        "name": device_name(device),
        "cores": hardware.core_count(),
        "threads": torch.get_num_threads(),
        "bf16": hardware.cpu_has_bf16(),
    }


def _environment() -> dict[str, Any]:
    """Versions of what has a part in the numbers."""
    return {
        "torch": str(torch.__version__),
        "ampfuse": ampfuse.__version__,
        **{name: metadata.version(name) for name in ("torchvision", "timm")},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "os": platform.platform(),
        "cpu": hardware.cpu_model(),
        "git": _git_revision(),
    }


def _git_revision() -> str | None:
    """The revision of the checkout that ampfuse runs from, with "+" if it was edited since."""
    folder = Path(ampfuse.__file__).parent

    def git(*words: str) -> str:
        # Without locks: the user's git may be at work beside a training, which may be killed.
        command = ["git", "--no-optional-locks", "-C", str(folder), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    with contextlib.suppress(OSError, subprocess.SubprocessError):
        # A copy in site-packages may lie in somebody else's repository.
        if git("ls-files", "__init__.py"):
            edited = git("status", "--porcelain", "--untracked-files=no")
            return git("rev-parse", "--short=12", "HEAD") + ("+" if edited else "")
    return None


# In the names of torch's operations. The first that fits counts.
_SERVERS = {
    "convolution": "cudnn_convolution miopen_convolution mkldnn_convolution _conv_depthwise "
    "slow_conv thnn_conv",
    "batch_norm": "cudnn_batch_norm miopen_batch_norm ampfuse::batch_norm_apply native_batch_norm "
    "batch_norm_elemt",
}
# By what such a name begins with; else torch's own.
_LIBRARIES = {"cudnn": "cudnn", "miopen": "miopen", "mkldnn": "onednn", "ampfuse": "ampfuse"}


def kernels_used(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Run `step` once and see who served its convolutions and batch norms: "cudnn", "onednn",
    "native", ... or None where the step has none."""
    cuda = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if cuda else []
    with silent_stderr(), torch.profiler.profile(activities=activities) as profiler:
        step()
    names = " ".join(event.key for event in profiler.key_averages())
    used: dict[str, Any] = {"cudnn": torch.backends.cudnn.version() if cuda else None}
    for what, words in _SERVERS.items():
        found = next((word for word in words.split() if word in names), None)
        used[what] = found and _LIBRARIES.get(re.split("_|::", found)[0], "native")
    return used
