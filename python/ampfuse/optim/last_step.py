"""What the last step decided, and warnings about skipped steps; nothing here waits by itself.

Single skipped steps are part of dynamic loss scaling. But one non-finite gradient after another
halves the scale down to its minimum, and then every step is skipped for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ampfuse.async_read import Sample, is_captured

if TYPE_CHECKING:
    from ampfuse._C import ParamTable

_log = logging.getLogger("ampfuse.optim")

# The default scale reaches the default minimum after 40 overflows.
STRETCH = 200
# The count on a device is read every so many steps.
LOOK = 20


def _copy_of(field: str) -> Callable[[Any], Tensor]:
    return lambda last_step: last_step._table.inspector.state_field(field).clone()


class LastStep:
    """What an optimizer's last step decided, as device tensors; only reading a value waits.

    Each is a 0-dim tensor on the parameters' device, copied when it is asked for.

    Attributes:
        skipped: float32, 1 if the step was skipped because a gradient held inf or NaN, else 0.
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
        """Where the latest overflow was, or None if there was none. Waits for the device.

        Returns:
            ``parameter`` (name of the first parameter whose gradient was not finite), ``kind``
            (``"inf"`` or ``"nan"``) and ``skipped_steps`` (how many steps were skipped so far).
        """
        row = int(self._table.inspector.state_field("last_bad_row"))
        if row < 0:
            return None
        bits = int(self._table.inspector.state_field("last_bad_bits"))
        return {
            "parameter": self._table.name(row),
            "kind": "nan" if bits > 0x7F800000 else "inf",
            "skipped_steps": int(self._table.inspector.state_field("skipped_steps")),
        }


class SkipWatch:
    """Raises after `STRETCH` skipped steps in a row, up to as many steps later.

    Warns at the first skipped step that it sees, and when their number reaches a power of two.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._counts: list[Sample] = []  # skipped steps, each `STRETCH` steps, the latest last
        self._seen = 0  # skipped steps
        self._look: Sample | None = None  # for the next warning

    def after_step(self, table: Any, skipped: bool, warns: bool) -> None:
        """Call after each step of an optimizer's `table`; `skipped`: the host knows that it was."""
        self._steps += 1
        if warns and (skipped or self._look is not None or self._steps % LOOK == 0):
            self._warn(table)
        if self._steps % STRETCH != 1:
            return
        count = table.inspector.state_field("skipped_steps")
        if is_captured(count):
            return
        counts, self._counts = self._counts, [*self._counts[-1:], Sample(count)]
        if len(counts) > 1:
            before, after = (int(each.values()[0]) for each in counts)
            if after - before == STRETCH:
                raise RuntimeError(_message(table))

    def _warn(self, table: Any) -> None:
        fields = [table.inspector.state_field(name) for name in ("skipped_steps", "last_bad_row")]
        if is_captured(fields[0]):
            return
        look = self._look = self._look or Sample(*fields)
        if not look.has_arrived():
            return
        self._look = None
        count, row = map(int, look.values())
        if count.bit_length() > self._seen.bit_length():
            _log.warning(
                "A step was skipped because the gradient of %s was not finite: %d of %d steps so "
                "far. amp.explain_overflow finds the operation where it originated; "
                "skip_nonfinite=False applies such steps.",
                table.name(row) if 0 <= row < len(table) else "another process",
                count,
                self._steps,
            )
        self._seen = count


def _message(table: Any) -> str:
    row = int(table.inspector.state_field("last_bad_row"))
    where = f"; the last was in {table.name(row)}" if row >= 0 else ""
    return (
        f"{STRETCH} steps in a row were skipped: every backward pass left inf or NaN in a "
        f"gradient{where}. No loss scale helps. Check the loss (is it finite without amp?), "
        "the learning rate and the data. The parameters are those of the last applied step."
    )
