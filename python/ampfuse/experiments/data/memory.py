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


def _available(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """What Linux could give without swapping."""
    kib = _table(meminfo).get("MemAvailable:")
    return None if kib is None else kib * 1024


def _left_of_cgroup(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the container may still take; None if it has no limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
    except OSError:
        return None
    # Files that were read count as used until something else wants the place.
    files = _table(folder / "memory.stat").get("inactive_file", 0)
    return int(limit) - used + files if limit.isdecimal() else None


def _table(path: Path) -> dict[str, int]:
    """Lines of a name and a number, perhaps with a unit."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines}
