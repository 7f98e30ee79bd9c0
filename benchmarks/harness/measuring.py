"""The way the benchmarks measure: rounds over all variants, a cold cache, peers in own processes.

:func:`measure` runs the variants of a case (ours, the peers, the machine's limits) in turns, so
that other load of the machine affects all of them alike. Peers run in a :class:`Worker`.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from .without_ampfuse import load

_measuring = load("measuring.py")

_LONGEST_QUEUEING_MS = 200.0
_SETTLING_S = 0.005  # threads that wait for work keep a core busy for a while
COLD_BYTES = 256 << 20  # more than last-level caches have

Times = dict[str, list[float]]


def measure(variants: Mapping[str, Callable[[], float]], repeats: int, warm_up: int = 2) -> Times:
    """Milliseconds that each variant says it took, `repeats` times after `warm_up`, in turns."""
    times: Times = {name: [] for name in variants}
    for round_ in range(warm_up + repeats):
        for name, variant in variants.items():
            time.sleep(_SETTLING_S)
            taken = variant()
            if round_ >= warm_up:
                times[name].append(taken)
    return times


class Clock:
    """Times a call on a device, from a cold cache: an array larger than the last-level cache is
    read before. Instructions, branch predictions and address translations stay warm.

    A GPU's time is between events, with the host ahead of it, as in training: the time to queue the
    call counts only if the call waits for the GPU. Or with `host`, how long the host is busy with a
    call on an idle device.
    """

    def __init__(self, device: torch.device, host: bool = False) -> None:
        self.device, self.host = device, host
        self._cold = torch.zeros(0 if host else COLD_BYTES // 4, device=device)
        self._cycles_per_ms = 0.0  # of a GPU that the host queues work for
        if device.type == "cuda" and not host:
            cycles = 50_000_000
            for _ in range(2):  # the first wakes the clocks
                taken = self._on_gpu(lambda: torch.cuda._sleep(cycles), 0)
            self._cycles_per_ms = cycles / taken

    def milliseconds(self, call: Callable[[], object], queueing_ms: float = 0.0) -> float:
        """The time of a call. The host queues it in `queueing_ms`; a GPU idles that long before."""
        self._cold.sum()
        if self.device.type == "cuda" and not self.host:
            return self._on_gpu(call, int(queueing_ms * self._cycles_per_ms))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    def _on_gpu(self, call: Callable[[], object], sleep_cycles: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        if sleep_cycles:
            torch.cuda._sleep(sleep_cycles)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end)


class Variant:
    """A call in this process, for :func:`measure`. Its method `prepare`, if any, runs before each
    call and is not timed. Its method `milliseconds`, if any, calls and measures itself."""

    def __init__(self, clock: Any, call: Callable[[], object]) -> None:
        self.clock, self.call = clock, call
        self._calls, self._queueing_ms = 0, 0.0

    def __call__(self) -> float:
        """Milliseconds of one call."""
        self._prepare()
        measure: Callable[[], float] | None = getattr(self.call, "milliseconds", None)
        own_ms = host_ms = 0.0

        def run() -> None:
            nonlocal own_ms, host_ms
            start = time.perf_counter()
            if measure is None:
                self.call()
            else:
                own_ms = measure()
            host_ms = (time.perf_counter() - start) * 1e3

        gc.disable()
        try:
            taken = self.clock.milliseconds(run, self._queueing_ms)
        finally:
            gc.enable()
        self._calls += 1
        if self._calls == 2:  # the first one compiled and allocated
            self._queueing_ms = min(1.5 * host_ms, _LONGEST_QUEUEING_MS)
        return taken if measure is None else own_ms

    def memory_mib(self) -> float:
        """The peak of the tensors that one call allocates."""
        self._prepare()
        device = self.clock.device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.call()
            return torch.cuda.max_memory_allocated(device) / 2**20
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            self.call()
        return _measuring.peak_bytes(profiled) / 2**20

    def answer(self) -> Any:
        """The result of the call's method `answer`."""
        return self.call.answer()  # type: ignore[attr-defined]

    def _prepare(self) -> None:
        getattr(self.call, "prepare", lambda: None)()


def held_bytes(model: Any, optimizer: Any) -> int:
    """Bytes of parameters, masters, buffers and states, each storage once."""
    masters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = pytree.tree_leaves([*map(dict, optimizer.state.values())])
    tensors = [*model.parameters(), *masters, *model.buffers(), *filter(torch.is_tensor, states)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


class WorkerError(RuntimeError):
    """An exception in a worker."""


class Worker(ProcessPoolExecutor):
    """A process for variants. It fails if ampfuse is imported there, unless it is `with_ampfuse`.
    Variants are made there, by functions and arguments that can be pickled; `host` is that of
    :class:`Clock`."""

    def __init__(
        self, device: torch.device, *, host: bool = False, with_ampfuse: bool = False
    ) -> None:
        context = multiprocessing.get_context("spawn")
        super().__init__(1, context, _begin, (device, host, with_ampfuse))

    def variant(self, make: Callable[..., Any], *arguments: Any) -> RemoteVariant:
        """The call that ``make(*arguments)`` returns there, on as many threads as torch has here.
        Raises WorkerError if it fails."""
        return RemoteVariant(self, self.ask(_make, torch.get_num_threads(), make, arguments))

    def clear(self) -> None:
        """Forget all variants."""
        with suppress(WorkerError):  # a process that died has none
            self.ask(_clear)

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function there. Raises WorkerError if it, or the process, fails."""
        try:
            reply, error = self.submit(_answer, function, arguments).result()
        except BrokenProcessPool as end:
            raise WorkerError(str(end)) from None
        if error:
            raise WorkerError(error)
        return reply


class RemoteVariant:
    """A :class:`Variant` that a worker has."""

    def __init__(self, worker: Worker, number: int) -> None:
        self._ask = partial(worker.ask, _run, number)

    def __call__(self) -> float:
        return self._ask("__call__")

    def memory_mib(self) -> float:
        return self._ask("memory_mib")

    def answer(self) -> Any:
        return self._ask("answer")


# The worker's side.
_served: Any = SimpleNamespace()


def _begin(device: torch.device, host: bool, with_ampfuse: bool) -> None:
    _served.clock, _served.with_ampfuse, _served.variants = Clock(device, host), with_ampfuse, []


def _make(threads: int, make: Callable[..., Any], arguments: Any) -> int:
    torch.set_num_threads(threads)
    _served.variants.append(Variant(_served.clock, make(*arguments)))
    return len(_served.variants) - 1


def _run(number: int, method: str) -> Any:
    return getattr(_served.variants[number], method)()


def _clear() -> None:
    _served.variants.clear()
    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, str]:
    """The result of the function, or what it raises: some exceptions cannot be pickled."""
    try:
        reply = function(*arguments)
        if "ampfuse" in sys.modules and not _served.with_ampfuse:
            raise RuntimeError("ampfuse was imported where a peer is measured")
    except Exception as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        return None, f"{type(error).__name__}: {reason}"
    return reply, ""
