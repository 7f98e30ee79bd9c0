"""``amp.advise``: which level to train at, found by training copies for a minute."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ampfuse.amp.casts import eager_module, is_installed
from ampfuse.amp.policy import LEVELS
from ampfuse.amp.session import enabled_of
from ampfuse.devices import device_name
from ampfuse.doctor import trainings
from ampfuse.doctor.trainings import Row, Task
from ampfuse.insight.inputs import LossFunction, check_owned, check_types
from ampfuse.insight.tables import aligned

# At equal speed: no loss scale before one, FP32 weights before half ones.
_PREFERENCE = ("O4", "O5", "O1", "O2", "O3")
_EQUAL = 1.05  # times nearer than that are the same; a level that gains less does not pay
_MAX_SKIPPED = 0.05  # of the steps, once the loss scale has settled
_NEGLIGIBLE = 0.01  # of the way that FP32's loss went: less is nothing one could see
_ROUNDING = 2.0**-8  # of the loss: a forward in BF16 alone makes that, also of a fitted model
_WINDOWS = 8  # of a curve, of which the means are compared
_MAX_BATCHES = 32  # that are kept of a loader


def advise(
    model: nn.Module,
    loss_function: LossFunction,
    batch: Any,
    optimizer: Optimizer,
    *,
    levels: Sequence[str] = tuple(LEVELS),
    seconds: float = 60.0,
    steps: int = 1000,
    seeds: int = 2,
) -> Advice:
    """Train copies of `model` and `optimizer` at each level, compare them and recommend one::

        advice = amp.advise(model, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
                            next(iter(loader)), optimizer)
        print(advice)

    All trainings start from the model as it is, on its device and in the mode it is in, and take
    the same batches with the same random numbers. FP32 (O0), always among them, is trained `seeds`
    times more, slightly changed: a level's loss may be as far from FP32's as these are from each
    other ("The yardstick" in docs/insight.md). Recommended is the fastest level that does not
    deviate, loses no tensor's updates, and skips no more than 5 % of its steps; O0 where nothing is
    5 % faster.

    The model, its gradients, the optimizer, random states, autocast and what the latest
    ``amp.initialize`` set up are left as they were. One copy exists at a time.

    Arguments:
        model: FP32, before ``amp.initialize`` and before DistributedDataParallel. What
            ``torch.compile`` made is trained uncompiled.
        loss_function: ``loss_function(model, batch)`` returns the loss. It has to use the `model`
            that it is given.
        batch: one batch, whatever `loss_function` takes (a tensor, a tuple, a list, a dict); or
            several: a DataLoader or an iterator (``iter(batches)``), whose first 32 are used, again
            and again. An iterator has moved on afterwards.
        optimizer: any, of parameters of the model.
        levels: which of O0 to O5.
        seconds: for everything, shared evenly; a slow level gets fewer steps, and at least five.
        steps: of each training, at most.
        seeds: FP32 trainings beside the first.

    Raises:
        TypeError, ValueError: an argument is not as above; or the training does not work, or has no
            finite loss, in FP32. What fails at another level is part of the advice.
    """
    levels = (levels,) if isinstance(levels, str) else tuple(dict.fromkeys(levels))
    check_types(model, optimizer, "amp.advise(model, loss_function, batch, optimizer)")
    _check(model, optimizer, levels, seconds=seconds, steps=steps, seeds=seeds)
    model = eager_module(model)
    device = next(model.parameters()).device
    task = Task(model, optimizer, loss_function, (), device)
    with trainings.untouched(task):
        task = dataclasses.replace(task, batches=_batches(batch))
        trainings.try_out(task)
        others = [level for level in levels if level != "O0"]
        share = seconds / (1 + len(others) + seeds)
        reference = trainings.run("O0", task, steps=steps, seconds=share)
        if problem := reference.failure or _not_finite(reference):
            raise ValueError(f"This training fails in FP32 already (O0): {problem}.")
        steps = len(reference.losses)
        rows = [trainings.run(level, task, steps=steps, seconds=share) for level in others]
        seeded = [
            trainings.run("O0", task, steps=steps, seconds=share, seed=seed + 1)
            for seed in range(seeds)
        ]
    # Its time is that of all its trainings, before and after the others.
    times = itertools.chain.from_iterable(row.milliseconds for row in (reference, *seeded))
    reference = dataclasses.replace(reference, milliseconds=tuple(times))
    rows = sorted((reference, *rows), key=lambda row: row.level)
    return conclude(rows, seeded, len(task.batches), device)


def conclude(
    rows: Sequence[Row], seeded: Sequence[Row], batches: int, device: torch.device
) -> Advice:
    """What `rows` (O0 among them) and the other seeds' trainings of O0 say."""
    reference = next(row for row in rows if row.level == "O0")
    judged = tuple(_judged(row, reference, seeded, batches) for row in rows)
    level, reason = _recommend(judged)
    return Advice(level, reason, judged, tuple(row.losses for row in seeded), device_name(device))


@dataclasses.dataclass(frozen=True)
class Advice:
    """What :func:`advise` found; ``print`` shows it as a table.

    Attributes:
        level: the recommended one.
        reason: why, in words.
        rows: a :class:`~ampfuse.doctor.trainings.Row` for each level.
        seed_losses: the curves of the FP32 trainings with other seeds.
        device: the name of the GPU or CPU.
    """

    level: str
    reason: str
    rows: tuple[Row, ...]
    seed_losses: tuple[tuple[float, ...], ...]
    device: str

    def __str__(self) -> str:
        heads = ("level", "steps", "ms/step", "speed", "MiB", "deviation", "allowed", "skipped")
        lines: list[tuple[str, ...]] = [(*heads, "stale", "")]
        for row in self.rows:
            cells = [""] * 8
            if row.failure is None:
                cells = [
                    str(len(row.losses)),
                    f"{row.median:.3g}",
                    f"{row.speedup:.2f}x",
                    f"{row.memory_mib:.1f}",
                    f"{row.deviation:.2g}" if row.level != "O0" else "-",
                    f"{row.allowed:.2g}",
                    str(row.skipped),
                    "-" if row.stale_share is None else f"{row.stale_share:.0%}",
                ]
            remark = "<- recommended" if row.level == self.level else row.objection or ""
            lines.append((row.level, *cells, remark))
        table = aligned(lines, left=(0, 9))
        return "\n".join(
            [f"On {self.device}:", *table, "", f"Train at {self.level}: {self.reason}"]
        )


# --- arguments ------------------------------------------------------------------------------------


def _check(model: nn.Module, optimizer: Any, levels: Sequence[str], **positive: float) -> None:
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ValueError(f"Pass the model inside {type(model).__name__}: model.module.")
    if is_installed(model) or enabled_of(optimizer) is not None:
        raise ValueError(
            "This model or optimizer went through amp.initialize already, which cannot be taken "
            "back. Ask for advice before it, with a new model and optimizer."
        )
    stepped = [weight for group in optimizer.param_groups for weight in group["params"]]
    check_owned(model, stepped, "They cannot be copied with it: put them into one module with it.")
    if unknown := [level for level in levels if level not in LEVELS]:
        raise ValueError(f"Unknown level {unknown[0]!r}; the levels are {', '.join(LEVELS)}.")
    for name, value in positive.items():
        if not value > 0:
            raise ValueError(f"{name} must be positive, not {value!r}.")


def _batches(batch: Any) -> list[Any]:
    """One batch in a list, or the first ones of a loader, whose random numbers stay."""
    generator = batch.generator if isinstance(batch, torch.utils.data.DataLoader) else None
    if not isinstance(batch, (torch.utils.data.DataLoader, Iterator)):
        return [batch]
    before = None if generator is None else generator.get_state()
    first = list(itertools.islice(batch, _MAX_BATCHES))
    if generator is not None and before is not None:
        generator.set_state(before)
    if not first:
        raise ValueError("There is no batch in what was given as batch.")
    return first


# --- conclusions ----------------------------------------------------------------------------------


def _judged(row: Row, reference: Row, seeded: Sequence[Row], batches: int) -> Row:
    if row.failure is not None:
        return dataclasses.replace(row, objection=row.failure)
    steps = len(row.losses)
    curves = [each.losses[:steps] for each in (reference, *seeded)]
    spread = max(distance(a, b, batches) for a, b in itertools.combinations(curves, 2))
    means = _means(curves[0], batches, steps)
    rounding = _ROUNDING * max(map(abs, means))
    row = dataclasses.replace(
        row,
        spread=spread,
        allowed=max(spread, _NEGLIGIBLE * (max(means) - min(means)), rounding),
        deviation=distance(row.losses, reference.losses, batches),
        speedup=reference.median / row.median,
    )
    return dataclasses.replace(row, objection=_objection(row))


def distance(a: Sequence[float], b: Sequence[float], batches: int) -> float:
    """The largest difference of two curves, in means of an eighth of the steps they share.

    That is of whole rounds through the `batches`, where there are enough: else their order would
    be part of it. inf if one is not finite.
    """
    steps = min(len(a), len(b))
    pairs = zip(_means(a, batches, steps), _means(b, batches, steps), strict=True)
    differences = [abs(one - other) for one, other in pairs]
    return max((d if math.isfinite(d) else math.inf for d in differences), default=math.inf)


def _means(losses: Sequence[float], batches: int, steps: int) -> list[float]:
    """Of the windows of :func:`distance` in the first `steps`; what is left over is left out."""
    window = max(1, steps // _WINDOWS)
    window = max(1, min(steps, -(-window // batches) * batches))
    starts = range(0, steps - window + 1, window)
    return [sum(losses[start : start + window]) / window for start in starts]


def _not_finite(row: Row) -> str | None:
    bad = next((i for i, loss in enumerate(row.losses, 1) if not math.isfinite(loss)), None)
    return None if bad is None else f"the loss is not finite from step {bad} on"


def _objection(row: Row) -> str | None:
    if problem := _not_finite(row):
        return problem
    if row.skipped > _MAX_SKIPPED * len(row.losses):
        return f"overflows: {row.skipped} of {len(row.losses)} steps skipped"
    if row.stale:
        more = f" and {len(row.stale) - 1} more" * (len(row.stale) > 1)
        return f"stands still, as updates round away: {row.stale[0]}{more}"
    return "the loss deviates from that of FP32" if row.deviation > row.allowed else None


def _recommend(rows: Sequence[Row]) -> tuple[str, str]:
    """The level, and the reason for it."""
    good = [row for row in rows if row.objection is None and row.level != "O0"]
    fastest = min(good, key=lambda row: row.median, default=None)
    worth = max(_EQUAL, fastest.speedup if fastest else 0)
    rejected = [
        f"{row.level} is {row.speedup:.2f}x as fast, but: {row.objection}."
        for row in rows
        if row.objection and row.speedup > worth
    ]
    if fastest is None:
        tried = "there are objections to every other level." if len(rows) > 1 else ""
        return "O0", " ".join([tried or "no other level was tried.", *rejected])
    if fastest.speedup < _EQUAL:
        why = (
            f"half precision is no faster here ({fastest.level}, the best of those without an "
            f"objection: {fastest.speedup:.2f}x)."
        )
        return "O0", " ".join([why, *rejected])
    near = [row for row in good if row.median <= fastest.median * _EQUAL]
    best = min(near, key=lambda row: _PREFERENCE.index(row.level))
    reason = (
        f"{best.speedup:.2f}x as fast as FP32, and its loss stays near that of FP32 "
        f"({best.deviation:.2g} apart; {best.allowed:.2g} is allowed)."
    )
    if others := [row.level for row in near if row is not best]:
        reason += f" As fast, within {_EQUAL - 1:.0%}: {', '.join(others)}."
    return best.level, " ".join([reason, *rejected])
