"""``apex.optimizers.FusedMixedPrecisionLamb`` on :class:`ampfuse.optim.LAMB`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ampfuse.compat.apex import amp_C
from ampfuse.compat.apex.optimizers.common import ApexOptimizer, arguments, driven_by
from ampfuse.compat.apex.optimizers.fused_lamb import FusedLAMB


class FusedMixedPrecisionLamb(FusedLAMB, own_step=False):
    """:class:`FusedLAMB` with FP32 masters, for a loop with torch's GradScaler.

    Arguments:
        step: what step counts start from.
        reduced_precision_dtype: half parameters have masters if this is given; it may be set later,
            before the first step.
        The others are :class:`FusedLAMB`'s.
    """

    multi_tensor_l2norm = staticmethod(amp_C.multi_tensor_l2norm_mp)
    multi_tensor_lamb = staticmethod(amp_C.multi_tensor_lamb_mp)

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        self._first_step = int(step)
        super().__init__(**arguments(locals(), "step", "reduced_precision_dtype"))
        self.skip_nonfinite = True
        self.reduced_precision_dtype = reduced_precision_dtype

    @property
    def reduced_precision_dtype(self) -> torch.dtype | None:
        return self._reduced_precision_dtype

    @reduced_precision_dtype.setter
    def reduced_precision_dtype(self, dtype: torch.dtype | None) -> None:
        self._reduced_precision_dtype = dtype
        self.master_weights = dtype is not None

    def step(self, closure: Callable[[], Any] | None = None, **driver: Any) -> Any:
        """One step; with ``grad_scaler=s`` torch's GradScaler unscales and skips on overflow."""
        with driven_by(self, driver):
            return ApexOptimizer.step(self, closure)
