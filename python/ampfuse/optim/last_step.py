"""What an optimizer's last step decided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from ampfuse._C import ParamTable


class LastStep:
    """What an optimizer's last step decided, as device tensors; reading one is what waits.

    Attributes (each a 0-dim tensor on the parameters' device, copied at the time of asking):
        skipped: float32, 1 if the step was skipped because a gradient held inf or NaN, else 0.
        grad_norm: float32, the L2 norm of the unscaled gradients before clipping; NaN if they were
            not finite. Known only if the step inspected gradients (scaling, clipping).
        loss_scale: float32, the scale the gradients were made with.
    """

    def __init__(self, table: ParamTable) -> None:
        self._table = table

    def _field(self, name: str) -> Tensor:
        return self._table.state_field(name).clone()

    @property
    def skipped(self) -> Tensor:
        return self._field("skip")

    @property
    def grad_norm(self) -> Tensor:
        return self._field("grad_norm")

    @property
    def loss_scale(self) -> Tensor:
        return self._field("loss_scale")

    def overflow(self) -> dict[str, Any] | None:
        """Where the latest overflow was, or None if there was none. Waits for the device.

        Returns:
            ``parameter`` (name of the first parameter whose gradient was not finite), ``kind``
            (``"inf"`` or ``"nan"``) and ``skipped_steps`` (how many steps were skipped so far).
        """
        row = int(self._table.state_field("last_bad_row"))
        if row < 0:
            return None
        bits = int(self._table.state_field("last_bad_bits"))
        return {
            "parameter": self._table.name(row),
            "kind": "nan" if bits > 0x7F800000 else "inf",
            "skipped_steps": int(self._table.state_field("skipped_steps")),
        }
