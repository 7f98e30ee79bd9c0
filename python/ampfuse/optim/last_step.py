"""The decisions of steps, and messages about skipped ones; nothing here waits by itself."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ampfuse.torch_utils import Sample, is_captured

if TYPE_CHECKING:
    from ampfuse._C import ParamTable

_log = logging.getLogger("ampfuse.optim")

# The history on a device is read every so many steps.
READ_EVERY = 20
# The reasons for which a step is skipped, as `LastStep.skipped` numbers them from 1.
REASONS = ("nonfinite", "spike")


class StepHistory(NamedTuple):
    """The fields of an optimizer's ``StepHistory``, in the order of csrc/core/step_state.h."""

    steps: float
    nonfinite: float
    spike: float
    in_a_row: float
    last_skipped: float
    last_reason: float
    last_spike: float
    norms: float
    log_mean: float
    log_variance: float


def _copy_of(field: str) -> Callable[[Any], Tensor]:
    return lambda last_step: last_step._table.inspector.state_field(field).clone()


class LastStep:
    """The decisions of an optimizer's last step, as device tensors; only reading a value waits.

    Each is a 0-dim tensor on the parameters' device, copied when it is asked for.

    Attributes:
        skipped: float32, why the step was skipped: 0 if it was applied, 1 if a gradient held inf or
            NaN, 2 if its norm was a spike (``skip_spikes``).
        grad_norm: float32, the L2 norm of the unscaled gradients before clipping; NaN if they were
            not finite. None if the step did not look: without scaling, clipping and skipping, or
            where a GradScaler has, or after several passes of `scale_loss`.
        loss_scale: float32, the scale the gradients were made with.
    """

    def __init__(self, table: ParamTable) -> None:
        self._table = table

    skipped = property(_copy_of("skip"))
    grad_norm = property(
        lambda self: _copy_of("grad_norm")(self) if self._table.plan.knew_norm else None
    )
    loss_scale = property(_copy_of("loss_scale"))

    def overflow(self) -> dict[str, Any] | None:
        """The place of the latest overflow, or None if there was none. Waits for the device.

        Returns:
            ``parameter`` (name of the first parameter whose gradient was not finite), ``kind``
            (``"inf"`` or ``"nan"``) and ``skipped_steps`` (how many steps were skipped for one).
        """
        field = self._table.inspector.state_field
        if (row := int(field("last_bad_row"))) < 0:
            return None
        return {
            "parameter": self._table.name(row),
            "kind": "nan" if int(field("last_bad_bits")) > 0x7F800000 else "inf",
            "skipped_steps": int(skipped_steps(self._table)["nonfinite"]),
        }


def skipped_steps(table: ParamTable) -> dict[str, Tensor]:
    """The number of skipped steps by reason: copies, float64 and 0-dim, on the device."""
    history = table.inspector.state_field("history").clone()
    return {name: history[StepHistory._fields.index(name)] for name in REASONS}


class SkipWatch:
    """Logs the first skipped step, and one whenever their number reaches a power of two.

    Raises when too many in a row were skipped. On a device it learns of them some steps later.
    """

    def __init__(self, history: Tensor | None = None) -> None:
        self._steps = 0
        self._pending: Sample | None = None
        numbers = [0.0] * len(StepHistory._fields) if history is None else history.tolist()
        self._seen = StepHistory(*numbers)

    def after_step(self, optimizer: Any, table: ParamTable, skipped: bool, logs: Any) -> None:
        """Call after each step.

        Arguments:
            skipped: the host already knows that the step was skipped.
            logs: the reasons of steps to log. Dynamic loss scaling is expected to skip some.
        """
        self._steps += 1
        if not (skipped or self._pending is not None or self._steps % READ_EVERY == 0):
            return
        if (arrived := self._arrived_history(table)) is None:
            return
        history, row = arrived
        seen, self._seen = self._seen, history
        _log_new_skips(seen, history, optimizer, row, logs)
        _check_streak(seen, history, optimizer.max_skipped_steps, row)

    def _arrived_history(self, table: ParamTable) -> tuple[StepHistory, str] | None:
        """The history and the name of the last bad row, or None while they are on their way."""
        fields = [table.inspector.state_field(name) for name in ("history", "last_bad_row")]
        if is_captured(fields[0]):
            return None
        sample = self._pending = self._pending or Sample(*fields)
        if not sample.has_arrived():
            return None
        self._pending = None
        numbers, row = sample.tensors()
        name = table.name(int(row)) if 0 <= row < len(table) else "another process"
        return StepHistory(*numbers.tolist()), name


def _log_new_skips(
    seen: StepHistory, history: StepHistory, optimizer: Any, row: str, logs: Any
) -> None:
    """Log if the number of steps that were skipped for `logs` has reached a power of two."""
    before, now = (int(sum(getattr(each, name) for name in logs)) for each in (seen, history))
    if now.bit_length() == before.bit_length():
        return
    step = f"Step {history.last_skipped:.0f}"
    reason = REASONS[int(history.last_reason) - 1]
    if reason not in logs:  # the one to log came before it, and its number is not kept
        reason, step = "spike", f"A step before step {history.last_skipped:.0f}"
    if reason == "nonfinite":
        text = (
            f"the gradient of {row} was not finite. amp.explain_overflow finds the "
            "operation where it originated; skip_nonfinite=False applies such steps."
        )
    else:
        text = (
            f"its gradient norm, {history.last_spike:.4g}, is a spike, more than "
            f"{optimizer.skip_spikes} deviations above {math.exp(history.log_mean):.4g} on the "
            "logarithmic scale."
        )
    _log.warning("%s was skipped: %s %d of %d steps so far.", step, text, now, history.steps)


def _check_streak(seen: StepHistory, history: StepHistory, limit: int | None, row: str) -> None:
    """Raise RuntimeError if a multiple of `limit` steps in a row were skipped since `seen`."""
    # How many of this streak were seen: none if a step was applied since.
    goes_on = history.in_a_row - seen.in_a_row == history.steps - seen.steps
    earlier = seen.in_a_row if goes_on else 0
    if limit is not None and history.in_a_row // limit > earlier // limit:
        raise RuntimeError(_too_many(history, row))


def _too_many(history: StepHistory, row: str) -> str:
    many = f"{history.in_a_row:.0f} steps in a row were skipped"
    same = "The parameters are those of the last applied step."
    if history.last_reason == 1:
        return (
            f"{many}: every backward pass left inf or NaN in a gradient; the last was in {row}. "
            "No loss scale helps. Check the loss (is it finite without amp?), the learning rate "
            f"and the data. {same}"
        )
    return (
        f"{many}: the last gradient norm, {history.last_spike:.4g}, is far above the mean, "
        f"{math.exp(history.log_mean):.4g}, of the steps that were applied. Check the learning "
        f"rate and the data, or raise skip_spikes. {same}"
    )
