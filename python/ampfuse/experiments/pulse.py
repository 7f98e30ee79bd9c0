"""What processes know of each other past the training: who ended, and why.

A collective that fails says that a connection broke, not whose process ended; others may hang in
theirs. So each process has a connection to process 0, over which every second it says that it is
there. The end of a process closes its connection, and process 0 tells all the others.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait

from torch.distributed import Store

_BEAT = 1.0  # seconds
_SILENT = 5.0  # seconds after which nobody counts on a process that says nothing
_HANGING = 20.0  # seconds that a process has to end by itself when the training is over
# What is said; words of why the training is over are longer.
_HERE, _BYE, _WHO = b"h", b"b", b"?"


class Pulse:
    """Of process `rank` of `size`; `leave` ends it, with why, where it hangs after that.

    The address is left at `store`, with a secret: who does not know it is not let in.
    """

    def __init__(
        self, store: Store, rank: int, size: int, patience: timedelta, leave: Callable[[str], None]
    ) -> None:
        self.why: str | None = None
        self._rank, self._leave = rank, leave
        self._over, self._stopped = threading.Event(), threading.Event()
        meet = _welcomed if rank == 0 else _joined
        self._others = meet(store, rank, size, patience.total_seconds())
        self._heard = dict.fromkeys(self._others, time.monotonic())
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._end_if_it_hangs, daemon=True).start()

    def _listen(self) -> None:
        beat = time.monotonic()
        while self._others and not self._stopped.is_set():
            for connection in wait(list(self._others.values()), _BEAT / 2):
                rank = next(r for r, c in self._others.items() if c is connection)
                try:
                    self._take(rank, connection.recv_bytes())
                except (EOFError, OSError):
                    del self._others[rank]
                    self._declare(f"process {rank} ended without a word (killed?)")
            if time.monotonic() > beat:
                beat = time.monotonic() + _BEAT
                self._tell(_HERE)

    def _take(self, rank: int, said: bytes) -> None:
        self._heard[rank] = time.monotonic()
        if said == _BYE:
            del self._others[rank]
        elif said == _WHO:
            self._name_the_silent()
        elif said != _HERE:
            self._declare(said.decode())

    def _tell(self, what: bytes) -> None:
        for connection in list(self._others.values()):
            with contextlib.suppress(OSError):  # of who ended, which is noticed elsewhere
                connection.send_bytes(what)

    def _declare(self, why: str) -> None:
        """The first word counts; process 0 tells it to all."""
        if self.why is None:
            self.why = why
            if self._rank == 0:
                self._tell(why.encode())
            self._over.set()

    def _name_the_silent(self) -> None:
        limit = time.monotonic() - _SILENT
        if silent := [rank for rank in self._others if self._heard[rank] < limit]:
            names = ", ".join(f"process {rank}" for rank in silent)
            self._declare(f"{names} no longer answer{'s' * (len(silent) == 1)}")

    def who_is_missing(self) -> str | None:
        """Why the training is over, if that is known within seconds."""
        if self._rank == 0:
            until = time.monotonic() + _SILENT
            while not self._over.wait(_BEAT) and time.monotonic() < until:
                self._name_the_silent()
        elif not self._over.wait(_BEAT):
            self._tell(_WHO)
            if not self._over.wait(_SILENT):
                self._name_the_silent()
        return self.why

    def leave_word(self, why: str) -> str:
        """Tell all why the training is over; returns the first word of any."""
        if self._rank == 0:
            self._declare(why)
        else:
            self._tell(why.encode())
            self._over.wait(_SILENT)  # for what process 0 makes of it
        return self.why or why

    def _end_if_it_hangs(self) -> None:
        self._over.wait()
        if not self._stopped.wait(_HANGING):
            self._leave(self.why or "")

    def stop(self) -> None:
        self._stopped.set()
        self._tell(_BYE)


_PLACE = "pulse"


def _welcomed(store: Store, rank: int, size: int, patience: float) -> dict[int, Connection]:
    """The connections of all others to process 0, by rank."""
    secret, others = secrets.token_hex(), {}
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=dual) as server:
        server.settimeout(patience)
        store.set(_PLACE, f"{server.getsockname()[1]} {secret}")
        while len(others) < size - 1:
            connection = Connection(server.accept()[0].detach())
            with contextlib.suppress(EOFError, OSError, ValueError):
                said, other = connection.recv_bytes(200).decode().split()
                if secrets.compare_digest(said, secret):
                    others[int(other)] = connection
    return others


def _joined(store: Store, rank: int, size: int, patience: float) -> dict[int, Connection]:
    """The connection to process 0."""
    port, secret = store.get(_PLACE).decode().split()
    address = os.environ["MASTER_ADDR"], int(port)
    connected = socket.create_connection(address, patience)
    connected.settimeout(None)
    connection = Connection(connected.detach())
    connection.send_bytes(f"{secret} {rank}".encode())
    return {0: connection}
