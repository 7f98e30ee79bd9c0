"""The processes of one training, as ``torchrun`` starts them; alone, a world of one."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ampfuse.experiments.pulse import Pulse

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
    _store: dist.Store | None = None
    _pulse: Pulse | None = None
    _host: dist.ProcessGroup | None = None

    @classmethod
    def of_environment(cls) -> World:
        get = os.environ.get
        return cls(int(get("RANK", 0)), int(get("WORLD_SIZE", 1)), int(get("LOCAL_RANK", 0)))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def connect(self, device: torch.device, patience: float, leave: Callable[[str], None]) -> None:
        """Meet the others: NCCL between GPUs, gloo between CPUs. All know of each other's end then.

        None waits longer than `patience` seconds for another. `leave` ends this process, with why
        the training is over, where it hangs after that.
        """
        if self.size == 1:
            return
        kind, own = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        limit, me = datetime.timedelta(seconds=patience), (self.rank, self.size)
        with self.watching_peers():
            self._store, *_ = next(dist.rendezvous("env://", *me, timeout=limit))
            self._pulse = Pulse(*me, lambda why: leave(self.named(why)))
            # NCCL ends a process that has waited, without an error; gloo is to be first.
            dist.init_process_group(
                kind,
                store=self._store,
                rank=self.rank,
                world_size=self.size,
                timeout=limit * (2 if kind == "nccl" else 1),
                device_id=own,
            )
            # What the hosts agree on goes past the GPUs, so that nobody waits for those. Over gloo
            # the end of a process is noticed at once too, which NCCL takes minutes for.
            self._host = dist.new_group(backend="gloo", timeout=limit)

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

    def stack(self, mine: Tensor) -> Tensor:
        """What all processes bring, CPU tensors of one shape, [size, ...]. All have to ask."""
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        if self.size == 1:
            return mine[None]
        with self.watching_peers():
            dist.all_gather(everyone, mine, group=self._host)
        return torch.stack(everyone)

    def of_main(self, text: str) -> str:
        """The `text` of the main process. All have to ask."""
        texts = [text]
        if self.size > 1:
            with self.watching_peers():
                dist.broadcast_object_list(texts, src=0, group=self._host)
        return texts[0]

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
            why = self._pulse and self._pulse.who_is_missing()
            raise PeerLost(
                self.named(why or f"no answer from another process ({said.splitlines()[0][:160]})")
            ) from error

    def fail(self, why: str) -> bool:
        """Tell the others that this process ends because of `why`. False if one has said so."""
        if self._pulse is None:
            return True
        mine = f"process {self.rank} ended: {why}"
        first = self._pulse.leave_word(mine)
        return first == mine or why not in first

    def named(self, what: str) -> str:
        return f"process {self.rank} of {self.size}: {what}"

    def close(self) -> None:
        if self._pulse:
            self._pulse.stop()
        if self.size > 1 and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
