"""``apex.amp.scaler``: ampfuse's loss scaler with the methods that apex's had besides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import ampfuse.amp.scaler
from ampfuse import ops


class LossScaler(ampfuse.amp.scaler.LossScaler):
    """A static or dynamic loss scale; see :class:`ampfuse.amp.LossScaler`.

    Pickles as plain numbers, and unpickles what apex's class of this name had pickled.
    """

    _overflow: Tensor | None = None

    def clear_overflow_state(self) -> None:
        """Forget the overflows that the ``unscale`` methods have seen."""
        self._overflow = None

    def unscale(
        self,
        model_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        unused_scale: float,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """``master_grads[i] = model_grads[i] / scale``; remembers a non-finite gradient.

        Arguments:
            model_grads, master_grads: lists of equal length, shapes and device; float32, float16
                or bfloat16. With `models_are_masters` they are the same tensors, and nothing
                happens for a static scale of 1.
            unused_scale: ignored.
            scale_override: divide by this instead of the scale.
        """
        if models_are_masters and self.is_always_one:
            return
        scale = self.loss_scale() if scale_override is None else scale_override
        flag = self._flag(model_grads)
        ops.scale(model_grads, master_grads, 1.0 / scale, flag)

    def unscale_with_stashed(
        self,
        model_grads: Sequence[Tensor],
        stashed_master_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:
        """``master = model * (out / grads_scale) + stashed * (out / stash_scale)``.

        Only the new gradients, `model_grads`, are looked at for overflow. `scale_override` is
        ``(grads_scale, stash_scale, out)``; by default ``(loss_scale(), 1, 1)``.
        """
        grads_scale, stash_scale, out = scale_override or (self.loss_scale(), 1.0, 1.0)
        flag = self._flag(model_grads)
        ops.axpby(
            model_grads,
            stashed_master_grads,
            master_grads,
            out / grads_scale,
            out / stash_scale,
            flag,
            check=0,
        )

    def update_scale(self) -> bool:
        """Adapt the scale to what the ``unscale`` methods saw. Waits for the device.

        Returns:
            Whether to skip the step: a dynamic scale met an overflow.
        """
        flag = torch.zeros(()) if self._overflow is None else self._overflow
        self.update([flag])
        return self.dynamic and bool(flag.item())

    def _flag(self, grads: Sequence[Tensor]) -> Tensor:
        if self._overflow is None:
            self._overflow = torch.zeros((), device=grads[0].device if grads else "cpu")
            self.snapshot(self._overflow.device)
        return self._overflow

    def __getstate__(self) -> dict[str, Any]:
        rule = self._rule
        return {
            "dynamic": self.dynamic,
            "_loss_scale": self._loss_scale,
            "_unskipped": self._unskipped,
            "_scale_factor": rule.growth_factor,
            "_scale_seq_len": rule.growth_interval,
            "_min_loss_scale": rule.min_scale,
            "_max_loss_scale": rule.max_scale,
            "_backoff_factor": rule.backoff_factor,
            "_hysteresis": rule.hysteresis,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        dynamic = bool(state.get("dynamic", False))
        scale = float(state.get("_loss_scale", 1.0))
        self.__init__(  # type: ignore[misc]
            "dynamic" if dynamic else scale,
            scale_factor=state.get("_scale_factor", 2.0),
            scale_window=state.get("_scale_seq_len", 2000),
            min_loss_scale=state.get("_min_loss_scale"),
            max_loss_scale=state.get("_max_loss_scale", 2.0**24),
            backoff_factor=state.get("_backoff_factor", 0.5),
            hysteresis=state.get("_hysteresis", 1),
        )
        self._loss_scale = scale
        self._unskipped = state.get("_unskipped", 0)


# Scripts save scalers as objects. These hold numbers only, which ``weights_only=True`` may load.
torch.serialization.add_safe_globals([LossScaler])
