"""Watches a training: times steps, profiles as many more, and records synchronization in one."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import weakref
from collections import Counter
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
from torch.utils._python_dispatch import TorchDispatchMode

from ampfuse.doctor.profile import CLOSURE, STEP
from ampfuse.insight.operations import callers
from ampfuse.measuring import StepClock, silent_stderr, wait_for

# Operations whose results the host has to know.
_SYNCHRONIZING = frozenset(
    "_local_scalar_dense nonzero masked_select _unique2 unique_dim unique_consecutive equal".split()
)


class Finished(BaseException):
    """Ends the script when enough was seen. Not an Exception, which scripts catch."""


class SyncRecorder(TorchDispatchMode):
    """Records the user's lines that synchronize with the GPU (or would, with one), and by what.

    On the CPU, operations inside an optimizer's step do not count: torch's optimizers keep their
    step counts there, so reading them would not wait for a GPU.
    """

    on_gpu = in_step = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, int, str]] = Counter()  # by file, line and operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            blocks = not (kwargs or {}).get("non_blocking") and True not in args[2:]
            source = args[1] if name == "copy_" else args[0]
            is_sync = source.is_cuda and not result.is_cuda and blocks
        elif name in _SYNCHRONIZING or _counts_a_mask(name, args):
            is_sync = args[0].is_cuda if self.on_gpu else not self.in_step
        else:
            is_sync = False
        if is_sync:
            place, _ = callers(sys._getframe(1))
            self.calls[(*(place or ("in torch", 0)), name)] += 1
        return result

    def lines(self) -> list[str]:
        """The lines, with the operations and how often each was called, most frequent first."""
        return [
            f"{file}:{line}: {linecache.getline(file, line).strip()}  ({count} x {name})"
            for (file, line, name), count in self.calls.most_common()
        ]


def _counts_a_mask(name: str, args: Any) -> bool:
    """Return whether it is an index by a mask, whose elements the host has to count. To assign one
    number to them, which torch keeps on the CPU, is a fill without a count."""
    if name not in ("index", "index_put", "index_put_"):
        return False
    if name != "index" and args[2].ndim == 0 and not args[2].is_cuda:
        return False
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


@dataclass
class Watch:
    """A context that watches what is trained in it, by this process.

    A step is one call of ``step`` of the optimizer that is the first to make `warmup` steps. After
    these, `steps` are timed with nothing else going on, then `steps` + 1 are profiled, of which the
    first is left out, and in one more lines that synchronize are recorded; then `stop` raises
    Finished. `milliseconds` has the time of each timed step, `optimizers` the types of all that
    stepped since then.
    """

    warmup: int
    steps: int
    stop: bool
    seen: int = 0
    milliseconds: list[float] = field(default_factory=list)
    optimizers: set[type[Optimizer]] = field(default_factory=set)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    profiler: profile | None = None
    syncs: SyncRecorder = field(default_factory=SyncRecorder)
    runs_profiler: bool = False  # the training itself
    done: bool = False

    def __enter__(self) -> Watch:
        self._process = os.getpid()
        self._counts: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._chosen: Any = None
        self._phases: Any = self._after_warmup()
        self._hooks = (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        )
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        if self.is_own_process():
            self._phases.close()

    def is_own_process(self) -> bool:
        """False in a process that the training forked."""
        return os.getpid() == self._process

    @property
    def problem(self) -> str | None:
        """The reason why too little was seen for a report."""
        if self.runs_profiler:
            return "the script runs torch's profiler itself: turn that off"
        if self.seen == 0:
            return (
                "no torch.optim.Optimizer made a step in this process; if other processes train, "
                "use `with ampfuse.doctor.examine():` around their loop"
            )
        if self.seen < self.warmup + self.steps + 2:  # the first profiled one is left out
            needed = self.warmup + 2 * self.steps + 1
            seen = "1 optimizer step" if self.seen == 1 else f"{self.seen} optimizer steps"
            return f"the training ended after {seen}; {needed} are needed: reduce warmup and steps"
        return None

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self.done or not self.is_own_process():
            return None
        if not callable(closure := kwargs.get("closure", *args[1:2])):
            self.syncs.in_step = True
            return None
        marked = record_function(CLOSURE)(closure)  # not the optimizer's own time
        if args[1:]:
            return (args[0], marked, *args[2:]), kwargs
        return args, kwargs | {"closure": marked}

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        if not self.is_own_process():
            return
        self.syncs.in_step = False
        if not self.done:
            self._count(optimizer)
        if self.done and self.stop:  # again, if the script caught the first one
            raise Finished

    def _count(self, optimizer: Optimizer) -> None:
        if self._chosen is None:
            count = self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
            self.seen = max(self.seen, count)
            if count == self.warmup:
                self._chosen = optimizer
                next(self._phases)
            return
        self.optimizers.add(type(optimizer))
        if optimizer is self._chosen:
            self.seen += 1
            next(self._phases, None)

    def _after_warmup(self) -> Iterator[None]:
        """The phases after the warm-up; each ``yield`` is a step of the training."""
        devices = (p.device for group in self._chosen.param_groups for p in group["params"])
        self.device = next((d for d in devices if d.type == "cuda"), self.device)
        self.syncs.on_gpu = self.device.type == "cuda"
        clock = StepClock(self.device)
        clock.resume()
        for _ in range(self.steps):
            yield
            clock.mark()
        self.milliseconds = clock.flush()
        if torch.autograd._profiler_enabled():
            self.runs_profiler = self.done = True
            return
        with silent_stderr():
            self.profiler = profile(record_shapes=True, acc_events=True)
            self.profiler.start()
        try:
            for _ in range(self.steps + 1):
                yield
                with record_function(STEP):
                    pass
        finally:
            wait_for(self.device)
            with silent_stderr():
                self.profiler.stop()
        with contextlib.ExitStack() as looking:
            if "torch._dynamo" in sys.modules:  # what is compiled shows no lines
                looking.enter_context(torch.compiler.set_stance("force_eager"))
            looking.enter_context(self.syncs)
            yield
        self.done = True
