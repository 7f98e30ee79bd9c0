"""Skipped steps are told of, and a training that has stopped says so; nothing waits for that.

Where the loss scale is dynamic single ones belong to it. But one non-finite gradient after another
halves it down to its minimum, and then every step is skipped for ever.
"""

from __future__ import annotations

import logging
from typing import Any

from ampfuse.async_read import Sample, is_captured

_log = logging.getLogger("ampfuse.optim")

# From the default scale to the default minimum are 40 overflows.
STRETCH = 200
# How many steps apart a device is asked for its count.
LOOK = 20


class SkipWatch:
    """Raises, a stretch later, after `STRETCH` steps in a row that were skipped.

    Warns of the first skipped step that it sees, and whenever their number reached a power of two.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._counts: list[Sample] = []  # of skipped steps, one a stretch, the latest last
        self._seen = 0  # skipped steps
        self._look: Sample | None = None  # of what `_tell` tells of

    def after_step(self, table: Any, skipped: bool, tells: bool) -> None:
        """Call after each step of an optimizer's `table`; `skipped`: the host knows that it was."""
        self._steps += 1
        if tells and (skipped or self._look is not None or self._steps % LOOK == 0):
            self._tell(table)
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

    def _tell(self, table: Any) -> None:
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
                "A step was skipped and changed nothing, as the gradient of %s was not finite: %d "
                "of %d so far. amp.explain_overflow names where that began; skip_nonfinite=False "
                "lets such steps through.",
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
        f"gradient{where}. No loss scale helps then. Look at the loss (is it finite without amp?), "
        "the learning rate and the data. The parameters are those of the last applied step."
    )
