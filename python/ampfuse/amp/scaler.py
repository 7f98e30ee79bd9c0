"""The loss scaler: one scale, adapted by the overflows of the backward passes that used it.

Scale and counters live on the device of the loss. A pass multiplies its loss by the scale and
updates it from the overflow flags of its optimizers in one small kernel; the host reads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ampfuse import _core
from ampfuse.optim.options import Rule, check
from ampfuse.torch_utils import dynamo_disable

# Without a minimum, a persistent NaN halves the scale to 0, and 1 / scale is inf from then on. This
# one mirrors the default maximum of 2**24: far below any useful scale, and 1 / scale is exact.
DEFAULT_MIN_SCALE = 2.0**-24
# The largest power of two in FP32: the most that a scale can grow to.
LARGEST_SCALE = 2.0**127

# What scale and counters can hold on the device.
_FP32 = torch.finfo(torch.float32)
_SCALE = Rule(lambda value: _FP32.tiny <= value <= _FP32.max, "positive and finite in FP32")
_COUNT = Rule(lambda value: 0 <= value < 2**31, "a number from 0 to 2**31 - 1")


class ScaleRule(NamedTuple):
    """The rule by which a loss scale adapts, in the order of ``_C.update_scale``."""

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float
    max_scale: float
    hysteresis: int

    def check(
        self, init_scale: float, low: str = "min_loss_scale", high: str = "max_loss_scale"
    ) -> None:
        """Raise ValueError for options that no loss scaler can work with; `low`, `high`: names."""
        check("init_scale", init_scale, _SCALE)
        check("growth_factor", self.growth_factor, Rule(lambda value: value > 1, "above 1"))
        inside = Rule(lambda value: 0 < value < 1, "between 0 and 1")
        check("backoff_factor", self.backoff_factor, inside)
        whole = Rule(lambda value: 1 <= value == int(value), "a whole number of at least 1")
        check("growth_interval", self.growth_interval, whole)
        check("hysteresis", self.hysteresis, whole)
        check(low, self.min_scale, _SCALE)
        above = Rule(lambda value: value >= self.min_scale, f"at least {low}, {self.min_scale}")
        check(high, self.max_scale, above)


class LossScaler:
    """Scales one loss: a fixed factor, or one that adapts.

    A dynamic scale is divided (times `backoff_factor`) after a pass with a non-finite gradient and
    multiplied by `scale_factor` after `scale_window` clean passes in a row.

    Arguments:
        loss_scale: ``"dynamic"``, or the static scale.
        init_scale, scale_factor, scale_window: start, growth factor and growth interval.
        min_loss_scale: minimum; None or 0 means ``2**-24``.
        max_loss_scale: maximum.
        backoff_factor: what an overflow multiplies the scale by.
        hysteresis: back off at this overflow since the scale last grew, and at each one after
            (Megatron-LM's rule; 1 = at every overflow).

    Attributes:
        dynamic: whether the scale adapts.

    Reading :meth:`loss_scale` or :meth:`state_dict` waits for the device; nothing else does.
    """

    def __init__(
        self,
        loss_scale: float | Literal["dynamic"],
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        *,
        backoff_factor: float = 0.5,
        hysteresis: int = 1,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        low = min_loss_scale or DEFAULT_MIN_SCALE
        rule = ScaleRule(
            scale_factor, backoff_factor, scale_window, low, max_loss_scale, hysteresis
        )
        rule.check(init_scale)
        self._rule = rule._replace(
            growth_interval=int(scale_window),
            max_scale=min(max_loss_scale, LARGEST_SCALE),
            hysteresis=int(hysteresis),
        )
        start = min(self._rule.max_scale, init_scale) if self.dynamic else float(loss_scale)
        check("loss_scale", start, _SCALE)
        # On the CPU until the first loss shows which device to live on.
        self._scale = torch.tensor(start, dtype=torch.float32)
        self._growth_tracker = torch.tensor(0, dtype=torch.int32)
        self._hysteresis_tracker = torch.tensor(self._rule.hysteresis, dtype=torch.int32)
        self._placed = False
        # A static scale of 1, as a script asked for it: known without the device.
        self.is_always_one = not self.dynamic and start == 1.0

    def snapshot(self, device: torch.device) -> Tensor:
        """A copy of the current scale on `device` (float32, 0-dim), which no update changes.

        The first call settles which device the scaler lives on.
        """
        self._place(device)
        return self._scale.to(device=device, copy=True)

    def _place(self, device: torch.device) -> None:
        if not self._placed:
            self._scale = self._scale.to(device)
            self._growth_tracker = self._growth_tracker.to(device)
            self._hysteresis_tracker = self._hysteresis_tracker.to(device)
            self._placed = True

    @dynamo_disable
    @torch.no_grad()
    def update(self, found_infs: Sequence[Tensor], shared: Sequence[Tensor] | None = None) -> None:
        """Adapt the scale to one backward pass, and let its optimizers share the overflow flag.

        `found_infs` are the flags (float32, 0-dim) of the optimizers' gradients of this pass. If
        one is 1, all flags of `shared` (without it: of `found_infs`) become 1: an overflow makes
        every optimizer of the pass skip. A static scale counts the pass and changes neither itself
        nor the flags.
        """
        if not self.dynamic:
            self._growth_tracker += 1
            return
        # Flags of models on other devices come here and go back, without the host looking at them.
        device = self._scale.device
        shared = found_infs if shared is None else shared
        here = [flag.to(device, non_blocking=True) for flag in shared]
        _core.C.update_scale(
            self._scale,
            self._growth_tracker,
            self._hysteresis_tracker,
            [flag.to(device, non_blocking=True) for flag in found_infs],
            *self._rule,
            here,
        )
        for flag, moved in zip(shared, here, strict=True):
            if moved is not flag:
                flag.copy_(moved, non_blocking=True)

    @property
    def current(self) -> Tensor:
        """The current scale where it is: float32, 0-dim. The next update writes to it."""
        return self._scale

    def loss_scale(self) -> float:
        """The current scale. Waits for the device."""
        return self._scale.item()

    # The names by which apex scripts read and set the state.
    @property
    def _loss_scale(self) -> float:
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        check("loss_scale", value, _SCALE)
        self._scale.fill_(float(value))
        self.is_always_one = not self.dynamic and float(value) == 1.0

    @property
    def _unskipped(self) -> int:
        return int(self._growth_tracker.item())

    @_unskipped.setter
    def _unskipped(self, value: int) -> None:
        check("unskipped", value, _COUNT)
        self._growth_tracker.fill_(int(value))

    def state_dict(self) -> dict[str, Any]:
        """``{"loss_scale": float, "unskipped": int}``, apex's format. Waits for the device.

        With hysteresis there is one more entry, ``"hysteresis_left"``.
        """
        state: dict[str, Any] = {"loss_scale": self.loss_scale(), "unskipped": self._unskipped}
        if self._rule.hysteresis > 1:
            state["hysteresis_left"] = int(self._hysteresis_tracker.item())
        return state

    @staticmethod
    def check_state(state: Any, name: str = "the loss scaler") -> None:
        """Raise RuntimeError if `state` is not a scaler's, and ValueError if it is damaged."""
        if not (isinstance(state, Mapping) and {"loss_scale", "unskipped"} <= state.keys()):
            raise RuntimeError(f"{name} must have 'loss_scale' and 'unskipped'; it is {state!r}.")
        check(f"loss_scale of {name}", state["loss_scale"], _SCALE)
        for key in ("unskipped", "hysteresis_left"):
            check(f"{key} of {name}", state.get(key, 0), _COUNT)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore scale and counters; whether the scale adapts stays as it was built.

        Raises as :meth:`check_state`; nothing has changed then.
        """
        self.check_state(state)
        self._loss_scale = state["loss_scale"]
        self._unskipped = state["unskipped"]
        self._hysteresis_tracker.fill_(int(state.get("hysteresis_left", self._rule.hysteresis)))

    def __repr__(self) -> str:
        kind = "dynamic" if self.dynamic else "static"
        return f"LossScaler({kind}, loss_scale={self.loss_scale()}, unskipped={self._unskipped})"
