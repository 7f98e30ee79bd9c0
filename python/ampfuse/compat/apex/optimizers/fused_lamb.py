"""``apex.optimizers.FusedLAMB`` on :class:`ampfuse.optim.LAMB`."""

from __future__ import annotations

import math
import sys
from typing import Any

from ampfuse.compat.apex import amp_C
from ampfuse.compat.apex.optimizers.common import ApexOptimizer, of_groups
from ampfuse.optim import LAMB


class FusedLAMB(ApexOptimizer, LAMB):
    """:class:`ampfuse.optim.LAMB` with apex's arguments.

    Arguments:
        lr, bias_correction, betas, eps, weight_decay, grad_averaging, use_nvlamb: as in ampfuse.
        adam_w_mode: decoupled weight decay, else L2 through the gradient.
        set_grad_none: whether ``zero_grad()`` drops gradients by default, or zeroes them.
        max_grad_norm: clip all gradients to this L2 norm first; inf: do not. As in apex 0 is a norm
            like any other, to which all gradients become zero.

    Raises:
        RuntimeError: `amsgrad`.
    """

    multi_tensor_l2norm = staticmethod(amp_C.multi_tensor_l2norm)
    multi_tensor_lamb = staticmethod(amp_C.multi_tensor_lamb)
    adam_w_mode = of_groups("decoupled_weight_decay", int)
    use_nvlamb = of_groups("use_nvlamb", bool)

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        given = locals()
        # The least of numbers in place of 0: it is 0 in FP32, which gradients are multiplied in.
        largest = None if max_grad_norm in (None, math.inf) else max_grad_norm or sys.float_info.min
        self.construct(given, max_grad_norm=largest)
        # As in apex, groups have the norm that was asked for. A step reads that of the optimizer.
        self.set_in_groups("max_grad_norm", max_grad_norm)
