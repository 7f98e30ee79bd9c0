"""Random numbers that depend on what they are for, and on nothing else: not on torch's global
generator, not on how many were drawn before, not on the number of processes that draw."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor


def seed_of(*what: object) -> int:
    """63 bits that differ for different `what`: strings and integers."""
    # Sums of seed and epoch would give one seed's second epoch to the next seed's first.
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*what: object) -> torch.Generator:
    """A CPU generator: the same numbers whatever the device of the training."""
    return torch.Generator().manual_seed(seed_of(*what))


@contextlib.contextmanager
def drawing_for(*what: object) -> Iterator[None]:
    """Context in which torch's global CPU generator starts from `what`; left as it was found."""
    # Not torch.manual_seed, which would seed the GPUs too.
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed_of(*what))
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def epoch_order(
    size: int, *, batch_size: int, rank: int, world_size: int, shuffle: bool, seed: int, epoch: int
) -> Tensor:
    """Which images this process trains on in `epoch`: int64 [batches, batch_size].

    All processes follow one order of all images, which depends on (`seed`, `epoch`) alone, and take
    turns in it batch by batch. Images short of a batch for every process are left out.
    """
    order = (
        torch.randperm(size, generator=generator("order", seed, epoch))
        if shuffle
        else torch.arange(size)
    )
    batches = size // (batch_size * world_size)
    return order[: batches * world_size * batch_size].view(batches, world_size, batch_size)[:, rank]


def upload(values: Tensor, device: torch.device) -> Tensor:
    """`values` (on the CPU) on `device`, without waiting for what the device is doing."""
    if device.type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def share(size: int, rank: int, world_size: int) -> range:
    """The test images of this process; those of all are `size`, each once."""
    return range(size * rank // world_size, size * (rank + 1) // world_size)
