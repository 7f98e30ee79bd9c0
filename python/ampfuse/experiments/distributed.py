"""The processes of one training, as ``torchrun`` starts them; alone, a world of one."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

# How long a process waits for the others before it gives them up.
_PATIENCE = datetime.timedelta(minutes=10)
# In what the errors say of peers that are gone.
_OF_PEERS = ("peer", "gloo", "nccl", "connection", "socket", "timed out", "timeout", "store")


class PeerLost(Exception):
    """Another process of this training ended, or stopped answering."""


@dataclasses.dataclass
class World:
    """This process among those of the training, numbered as torchrun does; else 0 of 1."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    _host: dist.ProcessGroup | None = None

    @classmethod
    def of_environment(cls) -> World:
        get = os.environ.get
        return cls(int(get("RANK", 0)), int(get("WORLD_SIZE", 1)), int(get("LOCAL_RANK", 0)))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def connect(self, device: torch.device) -> None:
        """Meet the other processes: NCCL between GPUs, gloo between CPUs."""
        if self.size == 1:
            return
        kind, own = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        with self.watching_peers():
            dist.init_process_group(kind, timeout=_PATIENCE, device_id=own)
            # What the hosts agree on goes past the GPUs, so that nobody waits for those. Over gloo
            # the end of a process is noticed at once too, which NCCL takes minutes for.
            self._host = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def any(self, wish: bool) -> bool:
        """True if any process says True. All have to ask."""
        return self.sum([float(wish)])[0] > 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes, element by element. All have to ask."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        with self.watching_peers():
            dist.all_reduce(total, group=self._host)
        return total.tolist()

    @contextlib.contextmanager
    def watching_peers(self) -> Iterator[None]:
        """Context for anything that talks to the others: their end becomes PeerLost."""
        try:
            yield
        except RuntimeError as error:  # dist.DistBackendError is one too
            said = str(error).strip()
            of_peers = any(word in said.lower() for word in _OF_PEERS)
            if self.size == 1 or not (of_peers or isinstance(error, dist.DistError)):
                raise
            raise PeerLost(
                f"process {self.rank} of {self.size}: another process of this training ended or no "
                f"longer answers ({said.splitlines()[0][:160]})"
            ) from error

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
