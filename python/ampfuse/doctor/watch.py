"""Watches a training: counts optimizer steps, times some of them, profiles as many more."""

from __future__ import annotations

import contextlib
import glob
import multiprocessing
import os
import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import profile, record_function
from torch.utils.data import dataloader

from ampfuse.doctor.annotations import BEGIN, CLOSURE, STEP, waits_annotated, wrapped
from ampfuse.measuring import silent_stderr


class Finished(BaseException):
    """Ends the script when enough was seen. No Exception: ``except Exception`` lets it through."""


@dataclass
class Stepper:
    """An optimizer of the script: what it steps, and how long its timed steps took."""

    cls: type[Optimizer]
    defaults: dict[str, Any]
    tensors: list[tuple[torch.Size, torch.dtype, torch.device]]
    seconds: list[float] = field(default_factory=list)


@dataclass
class Loading:
    """Waits of a DataLoader in timed steps; `busy_s`: CPU time in them or of workers, if known."""

    workers: int
    pinned: bool
    wait_s: float = 0.0
    busy_s: float = 0.0


@dataclass
class Watch:
    """A context that watches what is trained in it.

    A step is one call of ``step`` of the optimizer that is the first to make `warmup` steps. After
    these, `steps` are timed with nothing else going on, then as many are profiled. Other processes
    than this one are left alone.

    Attributes:
        stop: raise Finished after the last of them.
        seconds: of each timed step.
        queued: the share of them in which a thread (here or in a worker, the one that had to most)
            was ready to run and had no core, which is no wait for a file, a GPU or a lock.
        profiler: once the profile has begun. It is complete after the context.
    """

    warmup: int
    steps: int
    stop: bool
    seen: int = 0
    seconds: list[float] = field(default_factory=list)
    queued: float = 0.0
    steppers: dict[int, Stepper] = field(default_factory=dict)
    loading: Loading | None = None
    profiler: profile | None = None
    problem: str | None = None
    done: bool = False

    def __enter__(self) -> Watch:
        self._process = os.getpid()
        self._counts: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._chosen: object = None
        self._started = 0.0
        self._timing = False
        self._phases: Iterator[None] = iter(())
        self._annotation: record_function | None = None
        self._profiling = contextlib.ExitStack()
        self._hooks = contextlib.ExitStack()
        self._hooks.callback(register_optimizer_step_pre_hook(self._before).remove)
        self._hooks.callback(register_optimizer_step_post_hook(self._after).remove)
        iterators, profiles = dataloader._BaseDataLoaderIter, torch.autograd.profiler.profile
        self._hooks.enter_context(wrapped(iterators, "__next__", self._next_batch))
        for name in ("_prepare_trace", "_start_trace"):
            self._hooks.enter_context(wrapped(profiles, name, self._other_profile))
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()
        if os.getpid() == self._process:
            self._profiling.close()

    @property
    def needed(self) -> int:
        """How many steps are watched. The first profiled one pays for the profiler's start."""
        return self.warmup + 2 * self.steps + 1

    @property
    def step_ms(self) -> float:
        """The mean of the timed steps."""
        return statistics.fmean(self.seconds) * 1e3

    # --- around a step --------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if os.getpid() != self._process or self.done:
            return None
        self._started = time.perf_counter()
        if self.profiler and optimizer is self._chosen:
            self._annotation = record_function(STEP)
            self._annotation.__enter__()
        if not callable(closure := kwargs.get("closure", *args[1:2])):
            return None
        timed = self._not_counted()(closure)
        if args[1:]:
            return (args[0], timed, *args[2:]), kwargs
        return args, kwargs | {"closure": timed}

    @contextlib.contextmanager
    def _not_counted(self) -> Iterator[None]:
        """A closure's time is not that of the optimizer's step around it."""
        begin = time.perf_counter()
        with record_function(CLOSURE):
            yield
        self._started += time.perf_counter() - begin

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        if os.getpid() != self._process:
            return
        if not self.done:
            self._count(optimizer)
        if self.done and self.stop:  # again, if the script caught the first one
            raise Finished

    def _count(self, optimizer: Optimizer) -> None:
        if self._timing:
            now = time.perf_counter()
            self._stepper(optimizer).seconds.append(now - self._started)
            self._started = now  # of a step around this one the rest counts
        count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        if self._chosen is None and count == self.warmup:
            self._chosen, self._phases = optimizer, self._after_warmup()
        self.seen = max(self.seen, count) if self._chosen is None else self._counts[self._chosen]
        if optimizer is self._chosen:
            if self._annotation:
                self._annotation.__exit__(None, None, None)
                self._annotation = None
            next(self._phases, None)

    def _after_warmup(self) -> Iterator[None]:
        """What is done between steps from then on; goes on after each."""
        _synchronize()
        before, self._timing = _threads(), True
        for _ in range(self.steps):
            begin = time.perf_counter()
            yield
            self.seconds.append(time.perf_counter() - begin)
        _synchronize()  # a GPU's backlog belongs to the last step
        self.seconds[-1] = time.perf_counter() - begin
        self._timing = False
        self._count_threads(before)
        self._begin_profile()
        for _ in range(self.steps + 1):
            yield
        self.done = True
        self._profiling.close()

    def _stepper(self, optimizer: Optimizer) -> Stepper:
        if id(optimizer) not in self.steppers:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            self.steppers[id(optimizer)] = Stepper(
                type(optimizer),
                dict(optimizer.defaults),
                [(p.shape, p.dtype, p.device) for p in params if p.requires_grad],
            )
        return self.steppers[id(optimizer)]

    def _count_threads(self, before: tuple[Counter[str], Counter[str]]) -> None:
        """What the threads did in the timed steps."""
        ran, queued = (now - then for now, then in zip(_threads(), before, strict=True))
        self.queued = max(queued.values(), default=0) / 1e9 / sum(self.seconds)
        if self.loading and self.loading.workers:
            own = f"/proc/{self._process}/"
            in_workers = (ns for path, ns in ran.items() if not path.startswith(own))
            self.loading.busy_s = sum(in_workers) / 1e9

    # --- what is replaced meanwhile -------------------------------------------------------------

    def _begin_profile(self) -> None:
        if torch.autograd._profiler_enabled():
            return self._give_up()
        profiler = profile(record_shapes=True, acc_events=True)
        with silent_stderr():
            profiler.start()
        self._profiling.callback(self._end_profile)
        self._profiling.enter_context(waits_annotated())
        self.profiler = profiler
        with record_function(BEGIN):
            pass

    def _end_profile(self) -> None:
        assert self.profiler is not None
        _synchronize()
        with silent_stderr():
            self.profiler.stop()

    def _give_up(self) -> None:
        """The next step ends the script, if it is to be ended."""
        self.problem = "the script runs torch's profiler itself: switch that off"
        self.done = True

    def _other_profile(self, begin: Callable[..., Any], *args: Any) -> Any:
        """A second profile would end the process: where the script begins one, the watch ends."""
        if self.profiler and not self.done and os.getpid() == self._process:
            self._give_up()
            self._profiling.close()
        return begin(*args)

    def _next_batch(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        """Time the wait for a batch: whether it is work of this thread or of others."""
        if not self._timing:
            return original(iterator)
        begin, busy = time.perf_counter(), time.thread_time()
        try:
            return original(iterator)
        finally:
            if self.loading is None:
                self.loading = Loading(iterator._num_workers, iterator._pin_memory)
            self.loading.wait_s += time.perf_counter() - begin
            self.loading.busy_s += time.thread_time() - busy


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _threads() -> tuple[Counter[str], Counter[str]]:
    """Nanoseconds that each thread, here and in workers, ran; and was ready but had no core."""
    ran: Counter[str] = Counter()
    queued: Counter[str] = Counter()
    for pid in (os.getpid(), *(worker.pid for worker in multiprocessing.active_children())):
        for path in glob.glob(f"/proc/{pid}/task/*/schedstat"):  # Linux has them
            with contextlib.suppress(OSError), open(path) as file:  # the thread may have ended
                ran[path], queued[path], _ = map(int, file.read().split())
    return ran, queued
