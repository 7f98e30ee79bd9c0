"""Devices by name, and their names in results."""

from __future__ import annotations

import torch

from ampfuse import hardware
from ampfuse.command_line import UsageError


def choose_device(name: str) -> torch.device:
    """The device `name` ("auto", "cpu", "cuda", "cuda:N"); a GPU becomes the current one.

    Raises:
        UsageError: there is no such device.
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
    return f"{hardware.cpu_model()}, {threads} thread{'s' * (threads != 1)}"
