"""Watches a training: counts optimizer steps, times some of them, profiles as many more."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import dataloader

from ampfuse.insight.diagnosis import marks
from ampfuse.measuring import silent_stderr


class Finished(BaseException):
    """Ends the script when enough was seen. No Exception: ``except Exception`` lets it through."""


@dataclass
class Stepper:
    """An optimizer of the script: what it steps, and how long that took without the profiler."""

    cls: type[torch.optim.Optimizer]
    defaults: dict[str, Any]
    tensors: list[tuple[torch.Size, torch.dtype, torch.device]]
    seconds: float = 0.0


@dataclass
class Loading:
    """The waits of a DataLoader while the steps were timed; `busy_s` is the CPU time in them."""

    workers: int
    pinned: bool
    wait_s: float = 0.0
    busy_s: float = 0.0


@dataclass
class Watch:
    """A context that watches what is trained in it.

    A step is one call of ``step`` of the optimizer that is the first to make `warmup` steps, or of
    one that makes as many in a row after it (some scripts try a few with another one). After these,
    `steps` are timed with nothing else going on, then as many are profiled. Other processes than
    this one are left alone.

    Attributes:
        stop: raise Finished after the last of them.
        seconds: of each timed step.
        profiler: once the profile has begun. It is complete after the context.
    """

    warmup: int
    steps: int
    stop: bool
    seen: int = 0
    seconds: list[float] = field(default_factory=list)
    steppers: dict[int, Stepper] = field(default_factory=dict)
    loading: Loading | None = None
    profiler: profile | None = None
    problem: str | None = None
    done: bool = False

    def __enter__(self) -> Watch:
        self._process = os.getpid()
        self._counts: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._chosen: object = None
        self._others: deque[object] = deque(maxlen=self.warmup)  # that stepped since it did
        self._started = self._last = 0.0
        self._mark: record_function | None = None
        self._profiling = contextlib.ExitStack()
        self._hooks = contextlib.ExitStack()
        for register, hook in (
            (register_optimizer_step_pre_hook, self._before),
            (register_optimizer_step_post_hook, self._after),
        ):
            self._hooks.callback(register(hook).remove)
        self._hooks.enter_context(self._loaders_timed())
        self._hooks.enter_context(self._alone())
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
    def _timing(self) -> bool:
        return self.warmup <= self.seen < self.warmup + self.steps

    def _before(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if os.getpid() != self._process or self.done:
            return
        self._started = time.perf_counter()
        if self.profiler and optimizer is self._chosen:
            self._mark = record_function(marks.STEP)
            self._mark.__enter__()

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if os.getpid() != self._process:
            return
        if self.done:
            if self.stop:
                raise Finished  # the script caught the first one
            return
        timing = self._timing
        if timing:
            self._stepper(optimizer).seconds += time.perf_counter() - self._started
        count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        if self._chosen is None and count == self.warmup:
            self._chosen = optimizer
        self.seen = max(self.seen, count) if self._chosen is None else self._counts[self._chosen]
        if optimizer is not self._chosen:
            self._follow(optimizer)
            return
        self._others.clear()
        if self._mark:
            self._mark.__exit__(None, None, None)
            self._mark = None
        if timing:
            self.seconds.append(time.perf_counter() - self._last)
        if self.seen in (self.warmup, self.warmup + self.steps):
            self._wait()
        if self.seen == self.warmup + self.steps:
            self._begin_profile()
        elif self.seen == self.needed:
            self.done = True
            self._profiling.close()
        self._last = time.perf_counter()
        if self.done and self.stop:
            raise Finished

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch `optimizer`, if the one so far has given way to it."""
        self._others.append(optimizer)
        alone = len(self._others) == self.warmup == self._others.count(optimizer)
        if self._chosen is not None and self.profiler is None and alone:
            self._chosen, self._counts[optimizer] = optimizer, self.warmup
            self.seen, self.loading = self.warmup, None
            self.seconds.clear()
            self.steppers.clear()
            self._others.clear()
            self._last = time.perf_counter()

    def _wait(self) -> None:
        """A GPU has to have done what was timed. Its backlog belongs to the last timed step."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if self.seconds:
            self.seconds[-1] = time.perf_counter() - self._last

    def _begin_profile(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities, record_shapes=True, acc_events=True)
        if torch.autograd._profiler_enabled():
            return self._give_up()
        with silent_stderr():
            profiler.start()
        self._profiling.callback(self._end_profile)
        self._profiling.enter_context(marks.waits_marked())
        self.profiler = profiler
        with record_function(marks.BEGIN):
            pass

    def _end_profile(self) -> None:
        assert self.profiler is not None
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        with silent_stderr():
            self.profiler.stop()

    def _stepper(self, optimizer: torch.optim.Optimizer) -> Stepper:
        if id(optimizer) not in self.steppers:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            self.steppers[id(optimizer)] = Stepper(
                type(optimizer),
                dict(optimizer.defaults),
                [(p.shape, p.dtype, p.device) for p in params if p.requires_grad],
            )
        return self.steppers[id(optimizer)]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A second profile would end the process: where the script begins one, the watch ends."""
        kind: Any = torch.autograd.profiler.profile
        originals = {name: getattr(kind, name) for name in ("_prepare_trace", "_start_trace")}

        def guarded(original: Callable[..., Any]) -> Callable[..., Any]:
            def begin(*args: Any) -> Any:
                if self.profiler and not self.done and os.getpid() == self._process:
                    self._give_up()
                    self._profiling.close()
                return original(*args)

            return begin

        for name, original in originals.items():
            setattr(kind, name, guarded(original))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(kind, name, original)

    def _give_up(self) -> None:
        """The next step ends the script, if it is to be ended."""
        self.problem = "the script runs torch's profiler itself: switch that off"
        self.done = True

    @contextlib.contextmanager
    def _loaders_timed(self) -> Iterator[None]:
        """Time ``__next__`` of DataLoaders: whether a wait is work of this thread or of others."""
        iterator: Any = dataloader._BaseDataLoaderIter
        original: Callable[[Any], Any] = iterator.__next__

        def timed_next(this: Any) -> Any:
            if not self._timing:
                return original(this)
            begin, busy = time.perf_counter(), time.thread_time()
            try:
                return original(this)
            finally:
                if self.loading is None:
                    self.loading = Loading(this._num_workers, this._pin_memory)
                self.loading.wait_s += time.perf_counter() - begin
                self.loading.busy_s += time.thread_time() - busy

        iterator.__next__ = timed_next
        try:
            yield
        finally:
            iterator.__next__ = original

    @property
    def step_ms(self) -> float:
        """The mean of the timed steps."""
        return statistics.fmean(self.seconds) * 1e3
