"""Watches a training: counts optimizer steps, times some of them, profiles as many more."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import statistics
import time
import weakref
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

from ampfuse.doctor.trace import BEGIN, CLOSURE, STEP
from ampfuse.measuring import silent_stderr


class Finished(BaseException):
    """Ends the script when enough was seen. No Exception: ``except Exception`` lets it through."""


_FAULT_S = 2e-6  # that a page takes at most: other work of the system's is none of ours


@dataclass
class Watch:
    """A context that watches what is trained in it.

    A step is one call of ``step`` of the optimizer that is the first to make `warmup` steps. After
    these, `steps` are timed with nothing else going on, then as many are profiled. Other processes
    than this one are left alone.

    Attributes:
        stop: raise Finished after the last of them.
        seconds: of each timed step.
        optimizers, devices: of those that stepped in them, and of what they stepped.
        stepping_s, waiting_s: time in them in optimizers' steps, and waiting for a DataLoader.
        workers: of the DataLoader; None if there was none.
        paging_s: time in them, of all threads, in which the system made pages of memory.
        profiler: once the profile has begun. It is complete after the context.
    """

    warmup: int
    steps: int
    stop: bool
    seen: int = 0
    seconds: list[float] = field(default_factory=list)
    optimizers: set[type[Optimizer]] = field(default_factory=set)
    devices: set[torch.device] = field(default_factory=set)
    stepping_s: float = 0.0
    waiting_s: float = 0.0
    workers: int | None = None
    paging_s: float = 0.0
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
        self._hooks.enter_context(_wrapped(iterators, "__next__", self._next_batch))
        for name in ("_prepare_trace", "_start_trace"):
            self._hooks.enter_context(_wrapped(profiles, name, self._other_profile))
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
            self.stepping_s += now - self._started
            self._started = now  # of a step around this one the rest counts
            self.optimizers.add(type(optimizer))
            groups = optimizer.param_groups
            self.devices.update(param.device for group in groups for param in group["params"])
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
        self._timing = True
        before = resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(self.steps):
            begin = time.perf_counter()
            yield
            self.seconds.append(time.perf_counter() - begin)
        _synchronize()  # a GPU's backlog belongs to the last step
        self.seconds[-1] = time.perf_counter() - begin
        after = resource.getrusage(resource.RUSAGE_SELF)
        faults = after.ru_minflt - before.ru_minflt
        self.paging_s = min(after.ru_stime - before.ru_stime, _FAULT_S * faults)
        self._timing = False
        self._begin_profile()
        for _ in range(self.steps + 1):
            yield
        self.done = True
        self._profiling.close()

    # --- what is replaced meanwhile -------------------------------------------------------------

    def _begin_profile(self) -> None:
        if torch.autograd._profiler_enabled():
            return self._give_up()
        profiler = profile(record_shapes=True, acc_events=True)
        with silent_stderr():
            profiler.start()
        self._profiling.callback(self._end_profile)
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
        """Time the wait for a batch."""
        begin = time.perf_counter()
        try:
            return original(iterator)
        finally:
            if self._timing:
                self.workers = iterator._num_workers
                self.waiting_s += time.perf_counter() - begin


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextlib.contextmanager
def _wrapped(owner: type, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """In the block a call of ``owner.name`` is ``around(original, ...)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)
