"""``ampfuse.GradScaler``: torch's GradScaler without its extra pass and its synchronization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ampfuse import _core
from ampfuse.amp.scaler import DEFAULT_MIN_SCALE, LARGEST_SCALE, ScaleRule
from ampfuse.optim.base import handles_loss_scaling, under_grad_scaler
from ampfuse.optim.fused import is_fused
from ampfuse.optim.param_groups import check_optimizer, parameters
from ampfuse.torch_utils import HALF_DTYPES, dynamo_disable


class GradScaler(torch.amp.GradScaler):
    """A drop-in for ``torch.amp.GradScaler``.

    With an optimizer of ``ampfuse.optim`` (or one that went through ``amp.initialize``) ``step``
    is the optimizer's own: it inspects, unscales, clips and updates without another pass over the
    gradients and without the host waiting. FP32 gradients read unscaled afterwards, unless the
    optimizer was built with ``unscale_grads=False``. For other optimizers it is torch's.

    Other differences from torch's:

    - FP16 gradients of these optimizers are supported. ``unscale_`` replaces half gradients by FP32
      ones, since rounding them back would lose what scaling has saved (1e-3 / 65536 is 0 in FP16).
    - ``scaler.clip_grad_norm_(optimizer, max_norm)`` clips without materialising unscaled
      gradients.
    - the scale has a minimum and a maximum: a persistent NaN cannot halve it to 0.

    Arguments:
        device: device type that scales live on; None = "cuda" if there is a GPU, else "cpu".
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        min_scale, max_scale: bounds of the scale.

    Raises:
        AssertionError, ValueError: options that no loss scaler can work with.
        RuntimeError: ``unscale_`` or ``step`` twice for one optimizer without ``update``.

    Source: ``torch.amp.GradScaler``.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = DEFAULT_MIN_SCALE,
        max_scale: float = LARGEST_SCALE,
    ) -> None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._min_scale = float(min_scale)
        self._max_scale = min(float(max_scale), LARGEST_SCALE)
        # The kernel of all loss scales takes one; at 1 the scale backs off at every overflow.
        self._hysteresis_tracker: Tensor | None = None
        if self._enabled:
            self._rule.check(init_scale, "min_scale", "max_scale")

    @property
    def _rule(self) -> ScaleRule:
        return ScaleRule(
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
            self._min_scale,
            self._max_scale,
            1,
        )

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._hysteresis_tracker = torch.ones((), dtype=torch.int32, device=dev)

    @dynamo_disable
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale the gradients and step, or skip the step if one is non-finite.

        Arguments and return value as in ``torch.amp.GradScaler.step``. Whether the step was skipped
        is in ``optimizer.last_step.skipped``, on the device.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        check_optimizer(optimizer, "scaler.step(optimizer)")
        if "closure" in kwargs:
            raise RuntimeError("A closure is not supported while GradScaler is enabled.")
        if not handles_loss_scaling(optimizer):
            return self._step_other(optimizer, *args, **kwargs)
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")

        if state["stage"] is OptState.UNSCALED:
            flags = [flag.to(scale.device) for flag in state["found_inf_per_device"].values()]
            found_inf = torch.stack(flags).amax() if flags else torch.zeros_like(scale)
            grad_scale = getattr(optimizer, "grad_scale", None)
        else:
            found_inf = None  # the optimizer inspects the gradients anyway
            # torch multiplies by a grad_scale that the user had set on the optimizer; so do we.
            of_user = getattr(optimizer, "grad_scale", None)
            grad_scale = scale if of_user is None else scale * of_user
        with under_grad_scaler(
            optimizer, grad_scale=grad_scale, found_inf=found_inf, _scaler_is_ours=True
        ):
            result = optimizer.step(*args, **kwargs)
        if found_inf is None:
            skipped = optimizer.last_step.skipped
            if optimizer.skip_spikes is not None:  # spikes do not change the scale
                skipped = (skipped == 1).float()
            state["found_inf_per_device"] = {skipped.device: skipped}
        state["stage"] = OptState.STEPPED
        return result

    def _step_other(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Run torch's ``GradScaler.step``, for third-party optimizers and custom steps."""
        state = self._per_optimizer_states[id(optimizer)]
        scales_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        if state["stage"] is OptState.READY and not scales_itself:
            self.unscale_(optimizer)
        # Most custom steps need gradients of the parameter's type.
        for parameter in parameters(optimizer) if state["stage"] is OptState.UNSCALED else ():
            if parameter.grad is not None and parameter.dtype in HALF_DTYPES:
                parameter.grad = parameter.grad.to(parameter.dtype)
        return super().step(optimizer, *args, **kwargs)

    @dynamo_disable
    @torch.no_grad()
    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Clip the gradients of `optimizer` to `max_norm`, as measured after unscaling.

        With a fused optimizer nothing is rewritten: its next step clips. With another one this is
        ``unscale_`` (unless done) and ``torch.nn.utils.clip_grad_norm_``.

        Returns:
            The norm of the unscaled gradients before clipping: float32, 0-dim, on the device.

        Raises:
            TypeError: `optimizer` is not an optimizer, such as the model's parameters.
        """
        check_optimizer(optimizer, "scaler.clip_grad_norm_(optimizer, max_norm)")
        scale = None
        if self._enabled:
            current, _ = self._check_scale_growth_tracker("clip_grad_norm_")
            if self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
                scale = current
        if is_fused(optimizer):
            with under_grad_scaler(optimizer, grad_scale=scale):
                return optimizer.clip_next_step(max_norm)
        if scale is not None:
            self.unscale_(optimizer)
        return torch.nn.utils.clip_grad_norm_(parameters(optimizer), max_norm)

    @dynamo_disable
    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscale and check every gradient; half ones of our optimizers become FP32."""
        check_optimizer(optimizer, "scaler.unscale_(optimizer)")
        # torch allows FP16 if it only inspects, for its own fused optimizers: the scale is 1 then.
        if allow_fp16 or not hasattr(optimizer, "unscale_gradients"):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        sticky = optimizer.unscale_gradients(self._scale)
        flag = sticky.clone()
        sticky.zero_()  # `step` gives the flag back, if there is a step
        return {flag.device: flag}

    @dynamo_disable
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adapt the scale to the steps since the last update, or set it to `new_scale`.

        If any optimizer found a non-finite gradient the scale backs off; after `growth_interval`
        clean updates in a row it grows. Nothing waits.
        """
        if not self._enabled or new_scale is not None:
            return super().update(new_scale)
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        found_infs = [
            found_inf.to(scale.device, non_blocking=True)
            for state in self._per_optimizer_states.values()
            for found_inf in state["found_inf_per_device"].values()
        ]
        if not found_infs:
            raise AssertionError("No inf checks were recorded prior to update.")
        tracker = self._hysteresis_tracker
        assert tracker is not None
        # Nothing is shared: each optimizer skips for itself, as in torch.
        _core.C.update_scale(scale, growth_tracker, tracker, found_infs, *self._rule)
        self._per_optimizer_states.clear()
        return None
