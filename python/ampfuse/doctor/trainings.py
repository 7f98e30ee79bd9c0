"""Short trainings of copies: one model and optimizer, at each level, from the same start.

Nothing of the user's changes: weights, gradients, optimizer state, random numbers, and what the
latest ``amp.initialize`` set up are afterwards what they were.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampfuse import half_ops
from ampfuse.amp import function_casts
from ampfuse.amp import session as sessions
from ampfuse.amp.initialize import initialize
from ampfuse.amp.policy import LEVELS
from ampfuse.amp.scale_loss import scale_loss
from ampfuse.insight.inputs import LossFunction, call, same_random_numbers
from ampfuse.measuring import ProcessMemory, StepClock, TensorMemory

_LEAST_STEPS = 5  # however slow a level is
_REHEARSED_STEPS = 3  # clean ones, before anything is timed
_TRIES = 30  # from the first loss scale, 2**16, to 2**-14
_NUDGE = 2.0**-8  # rounding to BF16 changes a number by at most this share of it


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained. `model` and `optimizer` are the user's own, of which copies are made."""

    model: nn.Module
    optimizer: Optimizer
    loss_function: LossFunction
    batches: Sequence[Any]
    device: torch.device


@dataclasses.dataclass(frozen=True)
class Row:
    """What one level did, and from `speedup` on what is said of it.

    Attributes:
        level: "O0" to "O5".
        losses: of each step, before its update.
        milliseconds: of each step.
        memory_mib: peak of the tensors of copy and training.
        skipped: steps left out because a gradient overflowed, after the loss scale had settled.
        stale_share: of the weights without master that were to move in a last step, those that
            rounding kept; None where every weight has digits enough, or it cannot be told.
        stale: the parameters of which nearly all weights stayed.
        failure: why there is nothing of all this.
        speedup: time of O0 over this one's.
        deviation: from the loss of O0.
        spread: between seeds of O0, over as many steps as this level has.
        allowed: the deviation that counts as none: the largest of the spread, 1 % of the way that
            O0's loss went, and 0.4 % of the loss.
        objection: why this level is not to be used, or None.
    """

    level: str
    losses: tuple[float, ...] = ()
    milliseconds: tuple[float, ...] = ()
    memory_mib: float = math.nan
    skipped: int = 0
    stale_share: float | None = None
    stale: tuple[str, ...] = ()
    failure: str | None = None
    speedup: float = math.nan
    deviation: float = math.nan
    spread: float = math.nan
    allowed: float = math.nan
    objection: str | None = None

    @property
    def median(self) -> float:
        """Milliseconds of a step."""
        return statistics.median(self.milliseconds) if self.milliseconds else math.nan


def run(level: str, task: Task, *, steps: int, seconds: float, seed: int = 0) -> Row:
    """Train a copy for `steps`, or as many as `seconds` allow, at least 5. Raises nothing.

    With another `seed` than 0 the batches come in another order, and the weights start next to the
    user's, by as much as rounding them to BF16 could take them.
    """
    try:
        with sessions.set_aside():  # each as if it were the first
            return _run(level, task, steps, time.perf_counter() + seconds, seed)
    except Exception as error:
        # Its first line alone: the error itself would keep the copies in memory.
        first_line = (str(error).splitlines() or [""])[0]
        return Row(level, failure=f"{type(error).__name__}: {first_line}".rstrip(": "))


def _run(level: str, task: Task, steps: int, end: float, seed: int) -> Row:
    memory, scale = (math.nan, 1.0) if seed else _rehearse(level, task)
    if scale is None:
        return Row(level, failure=f"gradients overflow at every loss scale ({_TRIES} steps)")
    ProcessMemory(task.device).release()  # the copy of the rehearsal
    _seed(seed)
    training = Training(level, task, scale)
    batches = list(task.batches)
    if seed:
        random.shuffle(batches)
        training.nudge()
    losses = []
    clock = StepClock(task.device)
    clock.resume()
    for batch in itertools.islice(itertools.cycle(batches), steps):
        losses.append(training.step(batch))
        clock.mark()
        if len(losses) >= _LEAST_STEPS and time.perf_counter() > end:
            break
    times, skipped = clock.flush(), training.skipped
    stale_share, stale = training.stale(batches[len(losses) % len(batches)])
    values = torch.stack(losses).tolist()
    return Row(level, tuple(values), tuple(times), memory, skipped, stale_share, stale)


def _rehearse(level: str, task: Task) -> tuple[float, float | None]:
    """MiB of the training, and the loss scale it settles at: None if it finds none.

    Kernels are chosen and compiled, and a dynamic scale comes down, before anything is compared.
    """
    ProcessMemory(task.device).release()
    on_gpu = task.device.type == "cuda"
    before = torch.cuda.memory_allocated(task.device) / 2**20 if on_gpu else 0.0
    _seed(0)
    batches = itertools.cycle(task.batches)
    with TensorMemory(task.device) as memory:
        training = Training(level, task)
        for batch in itertools.islice(batches, 2):  # the second finds the optimizer's state there
            training.step(batch)
    clean, scale = 0, None
    for batch in itertools.islice(batches, _TRIES):
        skipped = training.skipped
        training.step(batch)
        clean = clean + 1 if training.skipped == skipped else 0
        if clean == _REHEARSED_STEPS:
            scale = training.scale
            break
    return memory.mib - before, scale


class Training:
    """A copy of the user's model and optimizer at a level.

    Raises what ``amp.initialize`` and the copying do.
    """

    def __init__(self, level: str, task: Task, scale: float = 2.0**16) -> None:
        self._level, self._loss_function = level, task.loss_function
        model, optimizer = copy.deepcopy((task.model, task.optimizer))
        self.model, self.optimizer = initialize(
            model, optimizer, opt_level=level, verbosity=0, init_scale=scale
        )

    def step(self, batch: Any) -> Tensor:
        """Forward, backward and update. Returns the loss: float32, 0-dim, on the device."""
        self.optimizer.zero_grad()
        loss = self._loss_function(self.model, batch)
        _check_loss(loss)
        with scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()
        return loss.detach().float()

    @property
    def skipped(self) -> int:
        """Steps that were left out so far; waits for the device."""
        optimizer: Any = self.optimizer
        overflow = optimizer.last_step.overflow()
        return 0 if overflow is None else overflow["skipped_steps"]

    @property
    def scale(self) -> float:
        """The present loss scale; waits for the device."""
        return sessions.of_optimizers([self.optimizer]).loss_scalers[0].loss_scale()

    @torch.no_grad()
    def nudge(self) -> None:
        """Change each weight at random, by up to ``2**-8`` of it."""
        for weight in self.model.parameters():
            if weight.is_floating_point():
                weight.mul_(1 + _NUDGE * (2 * torch.rand_like(weight) - 1))

    def stale(self, batch: Any) -> tuple[float | None, tuple[str, ...]]:
        """`stale_share` and `stale` of :class:`Row`, by one more step, which is metered."""
        policy = LEVELS[self._level]
        if not policy.model_is_low_precision or policy.master_weights:
            return None, ()
        optimizer: Any = self.optimizer
        try:
            meter = optimizer.meter(every=1)
        except TypeError:  # a step of its own, into which the meter cannot look
            return None, ()
        self.step(batch)
        rows = [row for row in meter.readings if not row.has_master]
        still, moved = sum(row.stale for row in rows), sum(row.changed for row in rows)
        share = still / (still + moved) if still + moved else None
        return share, tuple(row.parameter for row in rows if row.is_lost)


def _check_loss(loss: object) -> None:
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return
    what = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        what = f"a tensor of shape {list(loss.shape)}"
        what += "" if loss.requires_grad else " that needs no gradient"
    raise TypeError(
        "loss_function(model, batch) has to return the loss, a tensor of one element that "
        f"backward() can start from; it returned {what}."
    )


def try_out(task: Task) -> None:
    """One step of a copy at O0, so that mistakes in what the user gave are raised as they are.

    Raises:
        ValueError: the loss function does not use the model that it is handed; model and optimizer
            cannot be copied.
        TypeError: the loss function takes something else, or returns no loss.
    """
    try:
        copy.deepcopy((task.model, task.optimizer))
    except Exception as error:  # of whatever __deepcopy__ raises
        said = f"Model and optimizer cannot be copied (copy.deepcopy): {error}"
        raise ValueError(said) from error
    first_call = functools.partial(call, task.loss_function)
    training = Training("O0", dataclasses.replace(task, loss_function=first_call))

    def refuse(model: nn.Module, args: Any) -> None:
        raise ValueError(mistake)

    mistake = (
        "loss_function(model, batch) has to use the model it is handed, a copy; this one uses "
        "the original, which is not to be touched."
    )
    hook = task.model.register_forward_pre_hook(refuse)
    try:
        training.step(task.batches[0])
    finally:
        hook.remove()
    groups = training.optimizer.param_groups
    if all(weight.grad is None for group in groups for weight in group["params"]):
        raise ValueError(mistake.replace("this one uses", "its weights got no gradient. Is it"))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


@contextlib.contextmanager
def untouched(task: Task) -> Iterator[None]:
    """Around trainings: what they change of the process and of the user's objects is put back."""
    parameters = list(task.model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:  # a loss function that uses the original adds to none of its own
        parameter.grad = None
    try:
        with (
            same_random_numbers(),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast(task.device.type, enabled=False),
            function_casts.registered_for_now(),
            sessions.set_aside(),
            half_ops.unless_refused(),
        ):
            yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        ProcessMemory(task.device).release()
