"""Watches a training: counts optimizer steps, times some of them, profiles as many more."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.profiler import profile, record_function

from ampfuse.doctor.trace import CLOSURE, STEP
from ampfuse.measuring import silent_stderr, wait_for


class Finished(BaseException):
    """Ends the script when enough was seen. No Exception: ``except Exception`` lets it through."""


@dataclass
class Watch:
    """A context that watches what is trained in it.

    A step is one call of ``step`` of the optimizer that is the first to make `warmup` steps. After
    these, `steps` are timed with nothing else going on, then as many are profiled. Other processes
    than this one are left alone.

    Attributes:
        stop: raise Finished after the last of them.
        seconds: of each timed step.
        device: a GPU if the chosen optimizer has parameters on one, else the CPU.
        optimizers: the types of those that stepped since then.
        profiler: once the profile has begun. It is complete after the context.
    """

    warmup: int
    steps: int
    stop: bool
    seen: int = 0
    seconds: list[float] = field(default_factory=list)
    optimizers: set[type[Optimizer]] = field(default_factory=set)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    profiler: profile | None = None
    problem: str | None = None
    done: bool = False

    def __enter__(self) -> Watch:
        self._process = os.getpid()
        self._counts: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._chosen: object = None
        self._phases: Iterator[None] = iter(())
        self._profiling = contextlib.ExitStack()
        self._hooks = contextlib.ExitStack()
        self._hooks.callback(register_optimizer_step_pre_hook(self._before).remove)
        self._hooks.callback(register_optimizer_step_post_hook(self._after).remove)
        for name in ("_prepare_trace", "_start_trace"):
            self._hooks.enter_context(self._ended_by_profiles(name))
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()
        if os.getpid() == self._process:
            self._profiling.close()

    # --- around a step --------------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if os.getpid() != self._process or self.done:
            return None
        if not callable(closure := kwargs.get("closure", *args[1:2])):
            return None
        marked = record_function(CLOSURE)(closure)  # not the optimizer's own time
        if args[1:]:
            return (args[0], marked, *args[2:]), kwargs
        return args, kwargs | {"closure": marked}

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        if os.getpid() != self._process:
            return
        if not self.done:
            self._count(optimizer)
        if self.done and self.stop:  # again, if the script caught the first one
            raise Finished

    def _count(self, optimizer: Optimizer) -> None:
        if self._chosen is not None:
            self.optimizers.add(type(optimizer))
        count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        if self._chosen is None and count == self.warmup:
            self._chosen, self._phases = optimizer, self._after_warmup()
            devices = (p.device for group in optimizer.param_groups for p in group["params"])
            self.device = next((d for d in devices if d.type == "cuda"), self.device)
        self.seen = max(self.seen, count) if self._chosen is None else self._counts[self._chosen]
        if optimizer is self._chosen:
            if self.profiler:
                with record_function(STEP):
                    pass
            next(self._phases, None)

    def _after_warmup(self) -> Iterator[None]:
        """What is done between steps from then on; goes on after each."""
        wait_for(self.device)
        for _ in range(self.steps):
            begin = time.perf_counter()
            yield
            self.seconds.append(time.perf_counter() - begin)
        wait_for(self.device)  # a GPU's backlog belongs to the last step
        self.seconds[-1] = time.perf_counter() - begin
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

    def _end_profile(self) -> None:
        assert self.profiler is not None
        wait_for(self.device)
        with silent_stderr():
            self.profiler.stop()

    def _give_up(self) -> None:
        """The next step ends the script, if it is to be ended."""
        self.problem = "the script runs torch's profiler itself: switch that off"
        self.done = True

    @contextlib.contextmanager
    def _ended_by_profiles(self, name: str) -> Iterator[None]:
        """A second profile would end the process: where the script begins one, the watch ends.

        In the block, `name` of torch's profile is wrapped.
        """
        profiles = torch.autograd.profiler.profile
        original = getattr(profiles, name)

        @functools.wraps(original)
        def call(*args: Any) -> Any:
            if self.profiler and not self.done and os.getpid() == self._process:
                self._give_up()
                self._profiling.close()
            return original(*args)

        setattr(profiles, name, call)
        try:
            yield
        finally:
            setattr(profiles, name, original)
