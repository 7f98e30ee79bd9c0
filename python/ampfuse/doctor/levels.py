"""``amp.advise``: which level to train at, found by training copies for a minute."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ampfuse import half_ops
from ampfuse.amp import function_casts
from ampfuse.amp import session as sessions
from ampfuse.amp.casts import is_installed
from ampfuse.amp.initialize import initialize
from ampfuse.amp.policy import LEVELS
from ampfuse.amp.scale_loss import scale_loss
from ampfuse.devices import device_name
from ampfuse.insight.reporting import (
    LossFunction,
    aligned,
    check_owned,
    check_types,
    figures,
    loss_of,
    same_random_numbers,
)
from ampfuse.measuring import ProcessMemory, StepClock
from ampfuse.torch_utils import eager_module

# At equal speed: no loss scale before one, FP32 weights before half ones.
_PREFERENCE = ("O4", "O5", "O1", "O2", "O3")
_EQUAL = 1.05  # times nearer than that are the same; a level that gains less is not worth it
_MAX_SKIPPED = 0.05  # of the steps, once the loss scale is stable
_NEGLIGIBLE = 0.01  # fraction of the decrease of FP32's loss; smaller deviations are invisible
_ROUNDING = 2.0**-8  # to BF16: of a loss, and of the weights that another seed starts from
_WINDOWS = 8  # of a curve, of which the means are compared
_SEEDS = 2  # further trainings in FP32
_MAX_BATCHES = 32  # that are kept of a loader
_MIN_STEPS = 5  # however slow a level is
_FEW_STEPS = 2 * _WINDOWS  # with fewer, these means are of single steps
# Steps in which the loss scale comes down from 2**16, and how many in a row are not skipped then.
_MAX_ATTEMPTS, _CLEAN = 30, 3
_MUST_USE_THE_COPY = "loss_function(model, batch) must use the model it is passed, which is a copy."


@dataclass(frozen=True)
class Row:
    """The training at one level.

    `losses` has one value for each step, and so has `milliseconds`, which at O0 also has the steps
    of the trainings with other seeds. `skipped` counts skipped steps after the loss scale was
    stable; `stale` has the parameters without a master that lost nearly all updates to rounding.
    `speedup` and `deviation` compare with O0, `allowed` is the deviation that counts as none, and
    `blocker` says why the level is not to be used.
    """

    level: str
    losses: tuple[float, ...] = ()
    milliseconds: tuple[float, ...] = ()
    skipped: int = 0
    stale: tuple[str, ...] = ()
    blocker: str | None = None
    speedup: float = math.nan
    deviation: float = math.nan
    allowed: float = math.nan

    @property
    def median(self) -> float:
        """Milliseconds of a step."""
        return statistics.median(self.milliseconds) if self.milliseconds else math.nan


@dataclass(frozen=True)
class Advice:
    """The result of :func:`advise`: the recommended `level`, the `reason` for it as text, and a
    :class:`Row` for each level; ``print`` shows it as a table."""

    level: str
    reason: str
    rows: tuple[Row, ...]
    device: str

    def __str__(self) -> str:
        lines = [["level", "steps", "ms/step", "speed", "deviation", "allowed", "skipped", ""]]
        for row in self.rows:
            cells = [""] * 6
            if row.losses:
                cells = [str(len(row.losses)), figures(row.median, 3), f"{row.speedup:.2f}x"]
                cells += [figures(row.deviation, 2), figures(row.allowed, 2), str(row.skipped)]
            remark = "<- recommended" if row.level == self.level else row.blocker or ""
            lines.append([row.level, *cells, remark])
        table = "\n".join(aligned(lines, left=(0, 7)))
        return f"On {self.device}:\n{table}\n\nTrain at {self.level}: {self.reason}"


def advise(
    model: nn.Module,
    loss_function: LossFunction,
    batch: Any,
    optimizer: Optimizer,
    *,
    levels: Sequence[str] = tuple(LEVELS),
    seconds: float = 60.0,
    steps: int = 1000,
) -> Advice:
    """Train copies of `model` and `optimizer` at each level, compare them and recommend one::

        advice = amp.advise(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
                            next(iter(loader)), optimizer)
        print(advice)

    All trainings start from the model as it is, on its device and in its mode, and take the same
    batches with the same random numbers. FP32 (O0), always among them, is trained twice more,
    slightly changed: a level's loss may be as far from FP32's as these are from each other. The
    fastest level that passes the checks is recommended ("Which level to train at" in
    docs/insight.md). One copy exists at a time; nothing of yours changes.

    Arguments:
        model: FP32, before ``amp.initialize`` and before DistributedDataParallel. What
            ``torch.compile`` made is trained uncompiled.
        loss_function: ``loss_function(model, batch)`` returns the loss, of the `model` it is given.
        batch: one batch, whatever `loss_function` takes (a tensor, a tuple, a list, a dict); or a
            DataLoader or an iterator, whose first 32 are used, again and again. An iterator
            advances, and so does a sampler that draws otherwise than by torch.
        optimizer: any, of parameters of the model.
        levels: which of O0 to O5.
        seconds: for everything, shared evenly; a slow level gets fewer steps, and at least five.
        steps: of each training, at most.

    Raises:
        TypeError, ValueError: an argument is not as above; or the training does not work, or has no
            finite loss, in FP32. What fails at another level is part of the advice.
    """
    levels = (levels,) if isinstance(levels, str) else tuple(dict.fromkeys(levels))
    check_types(model, optimizer, "amp.advise(model, loss_function, batch, optimizer)")
    _check(model, optimizer, levels, seconds=seconds, steps=steps)
    task = _Task(eager_module(model), optimizer, loss_function)
    with _untouched(task):
        task.batches = _batches_of(batch)
        others = [level for level in levels if level != "O0"]
        run = functools.partial(task.run, seconds=seconds / (1 + len(others) + _SEEDS))
        reference = run("O0", steps)
        if problem := reference.blocker or _not_finite(reference):
            raise ValueError(f"This training already fails in FP32 (O0): {problem}.")
        steps = len(reference.losses)
        rows = [run(level, steps) for level in others]
        seeded = [run("O0", steps, seed=1 + seed) for seed in range(_SEEDS)]
    # Its time is that of all its trainings, before and after the others.
    times = sum((row.milliseconds for row in seeded), reference.milliseconds)
    reference = replace(reference, milliseconds=times)
    return conclude([reference, *rows], seeded, len(task.batches), device_name(task.device))


def _check(model: nn.Module, optimizer: Any, levels: Sequence[str], **positive: float) -> None:
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ValueError(f"Pass model.module, the model inside {type(model).__name__}.")
    if is_installed(model) or sessions.enabled_of(optimizer) is not None:
        raise ValueError(
            "This model or optimizer has already been through amp.initialize, which cannot be "
            "undone. Call advise before amp.initialize, on a new model and optimizer."
        )
    stepped = [weight for group in optimizer.param_groups for weight in group["params"]]
    suggestion = "Create it from model.parameters(), or put all it trains into one module."
    check_owned(model, stepped, suggestion)
    if unknown := [level for level in levels if level not in LEVELS]:
        raise ValueError(f"Unknown level {unknown[0]!r}; the levels are {', '.join(LEVELS)}.")
    if wrong := [name for name, value in positive.items() if not value > 0]:
        raise ValueError(f"{wrong[0]} must be positive, not {positive[wrong[0]]!r}.")


# --- trainings ------------------------------------------------------------------------------------


class _Task:
    """Trains copies of `model` and `optimizer`, which are the user's own."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, loss_function: Any) -> None:
        self.model, self._optimizer, self._loss_function = model, optimizer, loss_function
        self.device = next(model.parameters()).device
        self.batches: list[Any] = []

    def run(self, level: str, steps: int, *, seconds: float, seed: int = 0) -> Row:
        """Train a copy for `steps`, or as many as `seconds` allow, at least 5. At O0 mistakes in
        what the user gave are raised as they are; otherwise nothing is.

        With another `seed` than 0 the batches come in another order, and the weights start next to
        the user's, by as much as rounding them to BF16 could take them.
        """
        end = time.perf_counter() + seconds
        try:
            with sessions.set_aside():  # each as if it were the first
                scale = 1.0 if seed else self._stable_scale(level)
                if scale is None:
                    overflows = f"gradients overflow at every loss scale ({_MAX_ATTEMPTS} steps)"
                    return Row(level, blocker=overflows)
                return self._run(level, steps, end, scale, seed)
        except Exception as error:
            if level == "O0":
                raise
            # Its first line alone: the error itself would keep the copies in memory.
            first_line = (str(error).splitlines() or [""])[0]
            return Row(level, blocker=f"{type(error).__name__}: {first_line}".rstrip(": "))

    def _run(self, level: str, steps: int, end: float, scale: float, seed: int) -> Row:
        model, optimizer, step = self._start(level, scale, seed)
        batches, losses, clock = list(self.batches), [], StepClock(self.device)
        if seed:
            random.shuffle(batches)
            with torch.no_grad():
                for weight in filter(Tensor.is_floating_point, model.parameters()):
                    weight.mul_(1 + _ROUNDING * (2 * torch.rand_like(weight) - 1))
        clock.resume()
        for batch in itertools.islice(itertools.cycle(batches), steps):
            losses.append(step(batch))
            clock.mark()
            if len(losses) >= _MIN_STEPS and time.perf_counter() > end:
                break
        times, skipped, stale = clock.flush(), int(optimizer.skipped_steps["nonfinite"]), ()
        if LEVELS[level].model_is_low_precision and not LEVELS[level].master_weights:
            # The meter cannot see the updates of a custom step().
            with contextlib.suppress(TypeError):
                meter = optimizer.meter(every=1)
                step(batches[len(losses) % len(batches)])
                rows = (row for row in meter.readings if not row.has_master and row.is_lost)
                stale = tuple(row.parameter for row in rows)
        return Row(level, tuple(torch.stack(losses).tolist()), tuple(times), skipped, stale)

    def _stable_scale(self, level: str) -> float | None:
        """The value that a dynamic loss scale comes down to, or None. Also a warm-up of kernels."""
        model, optimizer, step = self._start(level)
        clean = 0
        for batch in itertools.islice(itertools.cycle(self.batches), _MAX_ATTEMPTS):
            skipped = optimizer.skipped_steps["nonfinite"]
            step(batch, functools.partial(loss_of, self._loss_function))
            if all(parameter.grad is None for parameter in model.parameters()):
                raise ValueError(f"{_MUST_USE_THE_COPY} The copy got no gradient.")
            clean = clean + 1 if optimizer.skipped_steps["nonfinite"] == skipped else 0
            if clean == _CLEAN:
                return sessions.of_optimizers([optimizer]).loss_scalers[0].loss_scale()
        return None

    def _start(
        self, level: str, scale: float = 2.0**16, seed: int = 0
    ) -> tuple[nn.Module, Any, Any]:
        """Copies of model and optimizer at a level, and a function that trains them on a batch: it
        returns the loss, float32, 0-dim, on the device."""
        ProcessMemory(self.device).release()  # of the copies before
        torch.manual_seed(seed)
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed)
        model, optimizer = copy.deepcopy((self.model, self._optimizer))
        model, optimizer = initialize(
            model, optimizer, opt_level=level, verbosity=0, init_scale=scale
        )

        def step(batch: Any, loss_function: Any = self._loss_function) -> Tensor:
            optimizer.zero_grad()
            loss = loss_function(model, batch)
            with scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            return loss.detach().float()

        return model, optimizer, step


def _batches_of(batch: Any) -> list[Any]:
    """The batch, or the first ones of a loader or an iterator. A loader gives afterwards those that
    it would have given: its workers stay, and so do generators of torch in it, in its samplers and
    its dataset."""
    if not isinstance(batch, (DataLoader, Iterator)):
        return [batch]
    states = []
    if isinstance(batch, DataLoader):
        parts = [batch, batch.dataset, batch.sampler, batch.batch_sampler]
        parts.append(getattr(batch.batch_sampler, "sampler", None))
        for value in [value for part in parts for value in getattr(part, "__dict__", {}).values()]:
            if isinstance(value, torch.Generator):
                states.append((value, value.get_state()))
        batch = copy.copy(batch)
        vars(batch)["_iterator"] = None  # of persistent workers
    batches = list(itertools.islice(batch, _MAX_BATCHES))
    for generator, state in states:
        generator.set_state(state)
    if not batches:
        raise ValueError("batch is empty: the loader or iterator has no batches.")
    return batches


@contextlib.contextmanager
def _untouched(task: _Task) -> Iterator[None]:
    """Around trainings: what they change of the process and of the user's objects is put back."""
    gradients = [(parameter, parameter.grad) for parameter in task.model.parameters()]

    def refuse(module: nn.Module, args: Any) -> None:
        if module is task.model:  # copies have the hook, too
            raise ValueError(f"{_MUST_USE_THE_COPY} It used the original model.")

    for parameter, _ in gradients:  # a loss function that uses the original adds to none of its own
        parameter.grad = None
    hook = task.model.register_forward_pre_hook(refuse)
    try:
        with (
            same_random_numbers(),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast(task.device.type, enabled=False),
            function_casts.registered_for_now(),
            sessions.set_aside(),
            half_ops.cpu_half_ops(half_ops.choice is not False),
        ):
            yield
    finally:
        hook.remove()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        ProcessMemory(task.device).release()


# --- conclusions ----------------------------------------------------------------------------------


def conclude(rows: Sequence[Row], seeded: Sequence[Row], batches: int, device: str) -> Advice:
    """The advice from `rows`, O0 first, and the trainings of O0 with other seeds."""
    full = rows[0], *seeded
    unstable = next(filter(None, (_instability(row, batches) for row in full)), None)
    judged = [_judged(row, full, batches, unstable) for row in rows]
    judged.sort(key=lambda row: row.level)
    return Advice(*_recommend(judged, unstable), tuple(judged), device)


def _instability(row: Row, batches: int) -> str | None:
    """The reason why no training can be compared with this one in FP32."""
    means = _means(row.losses, batches, len(row.losses))
    earlier, later = means[: len(means) // 2], means[len(means) // 2 :]
    keeps_rising = min(later) > max(earlier, default=math.inf)  # losses around 0 may go up and down
    if keeps_rising and means[-1] - means[0] > abs(means[0]):
        return f"its loss rises from {figures(means[0], 2)} to {figures(means[-1], 2)}"
    return _not_finite(row)


def _judged(row: Row, full: Sequence[Row], batches: int, unstable: str | None) -> Row:
    """The row, compared with the trainings in FP32, the first of which is that of the user."""
    if row.blocker is not None:
        return row
    steps, reference = len(row.losses), full[0]
    curves = [each.losses[:steps] for each in full]
    spread = max(distance(a, b, batches) for a, b in itertools.combinations(curves, 2))
    means = _means(curves[0], batches, steps)
    loss_range = max(means) - min(means)
    largest_loss = max(map(abs, means))
    allowed = max(spread, _NEGLIGIBLE * loss_range, _ROUNDING * largest_loss)
    deviation = distance(row.losses, reference.losses, batches)
    blocker = _not_finite(row)
    if row.skipped > _MAX_SKIPPED * steps:
        blocker = blocker or f"overflows: {row.skipped} of {steps} steps skipped"
    if row.stale:
        more = f" and {len(row.stale) - 1} more" if len(row.stale) > 1 else ""
        blocker = blocker or f"updates are lost to rounding in {row.stale[0]}{more}"
    if deviation > allowed:
        blocker = blocker or "the loss deviates from FP32's"
    if unstable and row is not reference:
        blocker = blocker or "there is no stable FP32 to compare with"
    speedup = reference.median / row.median
    return replace(row, speedup=speedup, deviation=deviation, allowed=allowed, blocker=blocker)


def distance(a: Sequence[float], b: Sequence[float], batches: int) -> float:
    """The largest difference of two curves, in means of an eighth of the steps they share.

    The means are of whole rounds through the `batches`, where there are enough: else their order
    would be part of it. inf if one is not finite.
    """
    steps = min(len(a), len(b))
    pairs = zip(_means(a, batches, steps), _means(b, batches, steps), strict=True)
    differences = [abs(one - other) for one, other in pairs]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def _means(losses: Sequence[float], batches: int, steps: int) -> list[float]:
    """Means over the whole windows of :func:`distance` in the first `steps`."""
    window = max(1, steps // _WINDOWS)
    window = min(steps, math.ceil(window / batches) * batches)
    starts = range(0, steps - window + 1, window)
    return [sum(losses[start : start + window]) / window for start in starts]


def _not_finite(row: Row) -> str | None:
    bad = next((i for i, loss in enumerate(row.losses, 1) if not math.isfinite(loss)), None)
    return None if bad is None else f"the loss is not finite from step {bad} on"


def _recommend(rows: Sequence[Row], unstable: str | None) -> tuple[str, str]:
    """The level, and the reason for it."""
    if unstable:
        why = f"no level can be compared with FP32, which is unstable itself: {unstable}. Lower the"
        return "O0", f"{why} learning rate, or clip gradients."
    good = [row for row in rows if row.blocker is None and row.level != "O0"]
    fastest = min(good, key=lambda row: row.median, default=None)
    speed_to_beat = max(_EQUAL, fastest.speedup if fastest else 0)
    rejected = [
        f" {row.level} is {row.speedup:.2f}x as fast, but: {row.blocker}."
        for row in rows
        if row.blocker and row.speedup > speed_to_beat
    ]
    if fastest is None:
        level, why = "O0", "every other level failed a check, or none was tried."
    elif fastest.speedup < _EQUAL:
        level = "O0"
        why = f"half precision is no faster here ({fastest.level}: {fastest.speedup:.2f}x)."
    else:
        near = (row for row in good if row.median <= fastest.median * _EQUAL)
        best = min(near, key=lambda row: _PREFERENCE.index(row.level))
        level = best.level
        why = (
            f"{best.speedup:.2f}x as fast as FP32, and its loss stays near that of FP32 "
            f"({figures(best.deviation, 2)} apart; {figures(best.allowed, 2)} is allowed)."
        )
    steps = min(len(row.losses) for row in rows if row.level in (level, "O0"))
    if steps < _FEW_STEPS:
        rejected.append(f" Only {steps} steps were compared: raise `seconds` or `steps`.")
    return level, why + "".join(rejected)
