"""What processes know of each other past the training: who ended, and why.

A collective that fails says that a connection broke, not whose process ended; others may hang in
theirs. So a thread of each process counts up in the store of the group, and looks whether the
counts of the others move and whether somebody left a last word. The first word counts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

_BEAT = 1.0  # seconds
# In beats of one's own: who was stopped itself accuses nobody.
_SILENT = 5  # without a beat, when a collective failed, and the process is given up
_GONE = 30  # the same while nothing failed; code that keeps Python's lock is to have its time
_HANGING = 20  # that a process has to end by itself when the training is over


class Pulse:
    """Of process `rank` of `size`; `leave` ends it, with why, where it hangs after the end."""

    def __init__(self, rank: int, size: int, leave: Callable[[str], None]) -> None:
        self.why: str | None = None
        self._rank, self._leave, self._word, self._patience = rank, leave, "", _GONE
        self._seen = {other: (0, 0) for other in range(size) if other != rank}
        self._beats = 0
        self._over, self._stopped = threading.Event(), threading.Event()
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._host = "torchrun" if by_agent else "process 0"
        # A connection of its own, since an operation on one that is shared waits for all others.
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"pulse{attempt}", dist.TCPStore(*place, is_master=False))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        over = 0
        while over < _HANGING:
            try:
                self._beat()
            except RuntimeError:  # the store is gone
                self.why = self.why or _silent(self._host)
            if self.why:
                self._over.set()
                over += 1
            if self._stopped.wait(_BEAT):
                return
        self._leave(self.why or "")

    def _beat(self) -> None:
        self._beats = self._store.add(str(self._rank), 1)
        for rank, (count, still) in self._seen.items():
            now = self._store.add(str(rank), 0)
            self._seen[rank] = now, still + 1 if now == count > 0 else 0
        if gone := [rank for rank, (_, still) in self._seen.items() if still >= self._patience]:
            self._word = self._word or _silent(*(f"process {rank}" for rank in gone))
        self.why = self._store.compare_set("over", "", self._word).decode() or None

    def who_is_missing(self) -> str | None:
        """Why a collective failed, if that is known within seconds."""
        self._patience, beats = _SILENT, self._beats
        if not self._over.wait(2 * _SILENT * _BEAT) and self._beats == beats:
            self.why = _silent(self._host)
        return self.why

    def leave_word(self, why: str) -> str:
        """Tell all why the training is over; returns the first word of any."""
        self._word = self._word or why
        self._over.wait(_SILENT * _BEAT)
        return self.why or why

    def stop(self) -> None:
        if self.why and self._rank == 0:
            time.sleep(3 * _BEAT)  # the store may end with this process: let the others read it
        self._stopped.set()
        self._thread.join(_SILENT * _BEAT)


def _silent(*names: str) -> str:
    return f"{', '.join(names)} no longer answer{'s' * (len(names) == 1)} (killed?)"
