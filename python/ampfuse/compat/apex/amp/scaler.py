"""``apex.amp.scaler``: ampfuse's loss scaler with the other methods of apex's.

At the end of a pass it prints apex's line for an overflow.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import ampfuse.amp.scaler
from ampfuse import ops
from ampfuse.amp.scaler import DEFAULT_MIN_SCALE, LARGEST_SCALE
from ampfuse.amp.session import Session
from ampfuse.compat.apex.amp._amp_state import maybe_print
from ampfuse.compat.apex.multi_tensor_apply import set_flag
from ampfuse.torch_utils import Sample, is_captured

# Names that apex's pickles use for the fields of `ScaleRule`, in its order; and where the
# constructor's argument differs.
_PICKLED = "scale_factor backoff_factor scale_seq_len min_loss_scale max_loss_scale hysteresis"
_RENAMED = {"scale_seq_len": "scale_window"}


def rule_field(field: str, kind: Callable[[Any], Any]) -> Any:
    """An attribute that is `field` of the rule; assigning it changes how the scale adapts."""

    def write(self: LossScaler, value: Any) -> None:
        rule = self._rule._replace(**{field: kind(value)})
        rule.check(init_scale=1.0)
        self._rule = rule

    return property(lambda self: getattr(self._rule, field), write)


class LossScaler(ampfuse.amp.scaler.LossScaler):
    """:class:`ampfuse.amp.LossScaler`; it pickles as numbers, and unpickles apex's of this name."""

    has_fused_kernel = True
    _buffer: Tensor | None = None
    # The latest backward pass: its optimizers, and what has taken their overflow in.
    _optimizers: tuple[weakref.ref[Any], ...] = ()
    _scale_has_followed = True
    _buffer_has_followed = True

    _scale_factor = rule_field("growth_factor", float)
    _scale_seq_len = rule_field("growth_interval", int)
    _max_loss_scale = rule_field("max_scale", lambda value: min(float(value), LARGEST_SCALE))
    _min_loss_scale = rule_field("min_scale", lambda value: float(value or DEFAULT_MIN_SCALE))

    @property
    def _overflow_buf(self) -> Tensor:
        """int32, one element: 1 if the latest pass, or an ``unscale`` since, met an overflow.

        After a pass with ``delay_overflow_check`` it inspects the gradients at this moment.
        """
        return self.read_flags()

    @_overflow_buf.setter
    def _overflow_buf(self, buffer: Tensor) -> None:
        self._buffer = buffer
        self._buffer_has_followed = True

    def read_flags(self) -> Tensor:
        """Take the flags of the latest pass into ``_overflow_buf``, once, and return it."""
        if self._buffer is None:
            self._buffer = torch.zeros(1, dtype=torch.int32, device=self.current.device)
        if not self._buffer_has_followed:
            self._buffer_has_followed = True
            for each in self._living_optimizers():
                is_known = self._scale_has_followed
                overflow = each.pass_found_inf_flag if is_known else each.inspect_gradients()
                set_flag(self._buffer, overflow)
        return self._buffer

    @property
    def _has_overflow(self) -> bool:
        """``_overflow_buf`` as a bool; reading it synchronizes with the device."""
        return bool(self._overflow_buf.item())

    @_has_overflow.setter
    def _has_overflow(self, value: Any) -> None:
        self._overflow_buf.fill_(bool(value))

    def clear_overflow_state(self) -> None:
        """Forget the overflows of the latest pass and of the ``unscale`` methods."""
        if self._buffer is not None:
            self._buffer.zero_()
        self._buffer_has_followed = True

    def after_pass(self, optimizers: Iterable[Any], *, scale_has_followed: bool) -> None:
        """A backward pass of `optimizers` has ended. The scale may have adapted to it already."""
        self.clear_overflow_state()
        self._optimizers = tuple(map(weakref.ref, optimizers))
        self._scale_has_followed = scale_has_followed
        self._buffer_has_followed = False

    def _living_optimizers(self) -> list[Any]:
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def unscale(
        self, model_grads: Sequence[Tensor], master_grads: Sequence[Tensor], unused_scale: Any,
        models_are_masters: bool = False, scale_override: Any = None,
    ) -> None:  # fmt: skip
        """``master_grads[i] = model_grads[i] / scale``; remembers a non-finite gradient.

        The lists have equal length, shapes and device; float32, float16 or bfloat16. With
        `models_are_masters` they are the same, and nothing happens for a static scale of 1.
        `scale_override` is divided by instead of the scale; `unused_scale` is ignored.
        """
        scale = self.loss_scale() if scale_override is None else scale_override
        if models_are_masters and not self.dynamic and scale == 1:
            return
        overflow = self._new_flag(model_grads)
        ops.scale(model_grads, master_grads, 1.0 / scale, overflow)
        set_flag(self._overflow_buf, overflow)

    def unscale_with_stashed(
        self, model_grads: Sequence[Tensor], stashed_master_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor], scale_override: Any = None,
    ) -> None:  # fmt: skip
        """``master = model * (out / grads_scale) + stashed * (out / stash_scale)``.

        Only the new gradients, `model_grads`, are looked at for overflow. `scale_override` is
        ``(grads_scale, stash_scale, out)``; by default ``(loss_scale(), 1, 1)``.
        """
        grads_scale, stash_scale, out = scale_override or (self.loss_scale(), 1.0, 1.0)
        overflow, scales = self._new_flag(model_grads), (out / grads_scale, out / stash_scale)
        ops.axpby(model_grads, stashed_master_grads, master_grads, *scales, overflow, check=0)
        set_flag(self._overflow_buf, overflow)

    def update_scale(self) -> bool:
        """Adapt the scale to ``_overflow_buf``. Synchronizes with the device.

        Returns whether to skip the step: a dynamic scale met an overflow. After a pass with
        ``delay_overflow_check`` the caller decides by that, and the optimizers no longer do.
        """
        overflow = self._overflow_buf.reshape(()).to(torch.float32)
        self.update([overflow])
        if not self._scale_has_followed:
            for optimizer in self._living_optimizers():
                optimizer.found_inf_flag.zero_()
        return self.dynamic and bool(overflow.item())

    def _new_flag(self, grads: Sequence[Tensor]) -> Tensor:
        device = grads[0].device if grads else self.current.device
        self.snapshot(device)  # it lives there from now on
        return torch.zeros((), device=device)

    def __getstate__(self) -> dict[str, Any]:
        state = {"dynamic": self.dynamic, "_loss_scale": self._loss_scale}
        left = int(self._hysteresis_tracker.item())
        rule = {f"_{n}": v for n, v in zip(_PICKLED.split(), self._rule, strict=True)}
        return {**state, "_unskipped": self._unskipped, "_hysteresis_left": left, **rule}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Without a minimum, apex's scale may have reached 0.
        scale = state.get("_loss_scale", 1.0) or state.get("_min_loss_scale") or DEFAULT_MIN_SCALE
        names = [name for name in _PICKLED.split() if f"_{name}" in state]
        options = {_RENAMED.get(name, name): state[f"_{name}"] for name in names}
        self.__init__("dynamic" if state.get("dynamic") else scale, **options)  # type: ignore[misc]
        self._loss_scale, self._unskipped = scale, state.get("_unskipped", 0)
        self._hysteresis_tracker.fill_(state.get("_hysteresis_left", self._rule.hysteresis))


# --- after a pass ---------------------------------------------------------------------------------


def after_pass(
    session: Session, loss_id: int, optimizers: list[Any], delay_unscale: bool,
    delay_overflow_check: bool,
) -> None:  # fmt: skip
    """Called at the end of ``scale_loss``: the scaler learns of the pass, and overflows print."""
    scaler = session.loss_scalers[loss_id]
    if isinstance(scaler, LossScaler) and not delay_unscale:
        has_followed = scaler.dynamic and not delay_overflow_check
        scaler.after_pass(optimizers, scale_has_followed=has_followed)
        if not delay_overflow_check:
            if len(session.loss_scalers) > 1:
                scaler.read_flags()  # those of the optimizers are of the next pass soon
            _report_overflows(session, loss_id, optimizers)


# Passes not reported yet, of all scalers, so that lines are printed in the order of the passes: the
# number of the scaler; its scale and the flags of its optimizers, on their way from the device.
_passes: deque[tuple[int, Sample]] = deque()


def _report_overflows(session: Session, loss_id: int, optimizers: list[Any]) -> None:
    """Print apex's line for each overflow that is known by now: on a GPU some passes later."""
    scaler, scale = session.loss_scalers[loss_id], session.loss_scalers[loss_id].current
    if not scaler.dynamic or is_captured(scale):
        return
    flags = [optimizer.pass_found_inf_flag for optimizer in optimizers]
    _passes.append((loss_id, Sample(scale, *flags)))
    while _passes and _passes[0][1].has_arrived():
        number, sample = _passes.popleft()
        new_scale, *overflows = sample.values()
        if any(overflows):
            line = f"Gradient overflow.  Skipping step, loss scaler {number} reducing loss scale to"
            maybe_print(f"{line} {new_scale}")
