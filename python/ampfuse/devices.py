"""Devices: by name, which ampfuse has kernels for, and what to do about the others."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from ampfuse import hardware
from ampfuse.command_line import UsageError


def choose_device(name: str) -> torch.device:
    """The device `name` ("auto", "cpu", "cuda", "cuda:N"); a GPU becomes the current one.

    Raises:
        UsageError: the device does not exist.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name}: must be auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: ampfuse only supports cpu and cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"--device {name}, but torch finds no usable GPU")
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise UsageError(f"--device {name}, but the last GPU is cuda:{count - 1}")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """The model of the GPU, or of the CPU with torch's number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{hardware.cpu_model()}, {threads} {'thread' if threads == 1 else 'threads'}"


def built_for() -> str:
    """The platform of torch's build: ``"CUDA 13.2"``, ``"ROCm 7.2.0"``, ``"MPS"``, ``"CPUs"``."""
    if torch.version.hip or torch.version.cuda:
        return f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    device = torch.accelerator.current_accelerator()
    return "CPUs" if device is None else device.type.upper()


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


def no_kernels_for(platform: str) -> str:
    """The message about devices of a `platform` (``"ROCm 7.2.0"``, ``"MPS"``) without kernels."""
    return (
        f"ampfuse has kernels for NVIDIA GPUs and CPUs, not for {platform}: train on the CPU, or "
        "under torch.amp alone"
    )


def device_problem(device: torch.device) -> str | None:
    """Why ampfuse has no kernels that run on `device`, and what to do; None if it has some."""
    if device.type in ("cpu", "meta"):
        return None
    if device.type != "cuda" or torch.version.hip:  # ROCm's GPUs are called "cuda" too
        return no_kernels_for(built_for() if device.type == "cuda" else device.type.upper())
    from ampfuse import _core  # here: the report of the environment asks what torch is built for

    capability = torch.cuda.get_device_capability(device)
    gpu = "sm_{}{}".format(*capability)
    of_torch, archs = torch.cuda.get_arch_list(), _core.C.cuda_archs()
    if of_torch and not covering_arch(of_torch, capability):
        missing = f"torch {torch.__version__} has no kernels for this GPU ({gpu})"
        if capability >= (7, 5):
            return f"{missing}: install the newest torch that ampfuse supports"
        newer = "use a GPU of Turing (sm_75) or later; on Kaggle, choose T4 x2"
        if capability < (6, 0):
            return f"{missing}: {newer}"
        # PyTorch's RFC 190385: CUDA 13 knows no GPU before Turing, and 2.15 has no other builds.
        return (
            f"{missing}: {newer}; or install torch 2.11 to 2.14 for CUDA 12.6, which has them "
            "(https://download.pytorch.org/whl/cu126), and compile ampfuse with CUDA 12"
        )
    if not covering_arch(archs, capability):
        return (
            f"it is {gpu}, but ampfuse was built for {' '.join(archs) or 'CPUs'}; use such a GPU, "
            "or compile ampfuse with an nvcc that supports this one: "
            f"AMPFUSE_CUDA=ON {_core.COMPILE}"
        )
    return _core.driver_problem(*_core.C.cuda_versions())


def check_device(device: torch.device, what: str) -> None:
    """Raise RuntimeError, naming `what` is there, if ampfuse has no kernels for `device`."""
    if problem := device_problem(device):
        raise RuntimeError(f"{what} is on {device}, where ampfuse cannot work: {problem}.")


def check_materialized(parameter: torch.Tensor, what: str) -> None:
    """Raise RuntimeError, naming `what` it is, for a parameter on the meta device."""
    if parameter.is_meta:
        raise RuntimeError(
            f"{what} is on the meta device, so it has no values to train. Materialize it "
            "(model.to_empty(device=...), then load or initialize it) and create the optimizer "
            "from the materialized parameters."
        )
