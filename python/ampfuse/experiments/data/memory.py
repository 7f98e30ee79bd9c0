"""How much fits into a device, asked before minutes are spent on filling it."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ampfuse.experiments.data.request import DataError


def check_room(size: int, device: torch.device, source: str) -> None:
    """Raise DataError if `size` bytes find no room on `device`; the message names `source`.

    What a training step takes comes on top and is not known here. Where the system does not tell
    what is free, nothing is checked.
    """
    free = _free(device)
    if free is not None and size > free:
        raise DataError(
            f"--data {source}: {size / 2**30:.1f} GiB of images, but {device} has "
            f"{free / 2**30:.1f} GiB free: give --loader workers, or a part of the data"
        )


def _free(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [value for value in (_available(), _left_of_cgroup()) if value is not None]
    # The processes of one machine fill its memory at the same time.
    return min(free) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if free else None


def _available() -> int | None:
    """What Linux could give without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kib[0]) * 1024 if kib else None


def _left_of_cgroup() -> int | None:
    """What the container may still take; None if it has no limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = ((folder / f"memory.{name}").read_text() for name in ("max", "current"))
    except OSError:
        return None
    return int(limit) - int(used) if limit.strip().isdecimal() else None
