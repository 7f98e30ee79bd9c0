"""``apex.optimizers.FusedAdam`` on :class:`ampfuse.optim.Adam`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ampfuse.compat.apex import amp_C
from ampfuse.compat.apex.optimizers.common import (
    ApexOptimizer,
    arguments,
    driven_by,
    of_groups,
)
from ampfuse.optim import Adam

_REFUSED = ("grads", "output_params", "scale", "grad_norms")


class FusedAdam(ApexOptimizer, Adam, own_step=False):
    """:class:`ampfuse.optim.Adam` with apex's arguments; by default it is AdamW.

    Arguments:
        lr, betas, eps, weight_decay: as in torch.
        bias_correction: False uses the moments as they are.
        adam_w_mode: decoupled weight decay (AdamW), else L2 through the gradient (Adam).
        set_grad_none: whether ``zero_grad()`` drops gradients by default, or zeroes them.
        capturable: a step never waits, and can be captured; with True, one that a GradScaler
            drives leaves half gradients unscaled too.
        master_weights: keep FP32 masters of half parameters; apex wants `capturable` with it.

    Raises:
        RuntimeError: `amsgrad`; `master_weights` without `capturable`.
    """

    multi_tensor_adam = staticmethod(amp_C.multi_tensor_adam)
    multi_tensor_adam_capturable = staticmethod(amp_C.multi_tensor_adam_capturable)
    multi_tensor_adam_capturable_master = staticmethod(amp_C.multi_tensor_adam_capturable_master)
    adam_w_mode = of_groups("decoupled_weight_decay", int)

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if master_weights and not capturable:
            raise RuntimeError("FusedAdam takes master_weights=True with capturable=True only.")
        self.construct(arguments(locals(), "capturable"), "bias_correction")
        self.capturable = capturable

    @property
    def _unscales_half(self) -> bool:  # type: ignore[override]
        return self.capturable

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        **driver: Any,
    ) -> Any:
        """One step. ``step(grad_scaler=s)`` unscales, and skips on overflow, by torch's GradScaler.

        Raises:
            RuntimeError: one of the arguments in the middle, which apex gave up, is not None.
        """
        given = (grads, output_params, scale, grad_norms)
        refused = [name for name, value in zip(_REFUSED, given, strict=True) if value is not None]
        if refused:
            raise RuntimeError(
                f"FusedAdam.step takes no {', '.join(refused)}: gradients are read from .grad, and "
                "amp or a GradScaler unscales them."
            )
        with driven_by(self, driver):
            return super().step(closure)
