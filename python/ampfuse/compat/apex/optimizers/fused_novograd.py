"""``apex.optimizers.FusedNovoGrad`` on :class:`ampfuse.optim.NovoGrad`."""

from __future__ import annotations

from typing import Any

from ampfuse.compat.apex import amp_C
from ampfuse.compat.apex.optimizers.common import ApexOptimizer, of_groups
from ampfuse.optim import NovoGrad
from ampfuse.optim.fused import is_fused
from ampfuse.optim.masters import HALF_DTYPES


class FusedNovoGrad(ApexOptimizer, NovoGrad):
    """:class:`ampfuse.optim.NovoGrad` with apex's arguments.

    Arguments:
        lr, bias_correction, betas, eps, weight_decay, reg_inside_moment, grad_averaging,
            init_zero: as in ampfuse.
        norm_type: 2, or 0 for the largest magnitude.
        set_grad_none: whether ``zero_grad()`` drops gradients by default, or zeroes them.

    Raises:
        RuntimeError: `amsgrad`, or another `norm_type`.
    """

    multi_tensor_novograd = staticmethod(amp_C.multi_tensor_novograd)
    moment_mode = of_groups("reg_inside_moment", lambda inside: 1 - inside, lambda mode: mode == 0)

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if norm_type not in (0, 2):
            raise RuntimeError(f"FusedNovoGrad's norm_type is 2, or 0 for the maximum: {norm_type}")
        self.construct(locals())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads apex's and ampfuse's state dicts.

        apex kept the norms in the group: those of its half parameters, then of the others.

        Raises:
            ValueError: the norms belong to other parameters. Nothing was loaded.
        """
        state = {key: dict(value) for key, value in state_dict["state"].items()}
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group, own in zip(groups, self.param_groups, strict=False):
            norms = group.pop("exp_avg_sq", None) if is_fused(self) else None
            if norms is None or len(group["params"]) != len(own["params"]):
                continue  # groups that do not fit are torch's to refuse
            of_half = {
                key: param.dtype in HALF_DTYPES
                for key, param in zip(group["params"], own["params"], strict=True)
            }
            for is_half, values in zip((True, False), norms, strict=True):
                keys = [key for key, half in of_half.items() if half == is_half]
                if len(keys) != len(values):
                    raise ValueError(
                        f"The state holds norms of {len(values)} parameters where there are "
                        f"{len(keys)}. Nothing was loaded."
                    )
                for key, value in zip(keys, values, strict=True):
                    state.setdefault(key, {})["exp_avg_norm"] = value.detach().clone()
        super().load_state_dict({**state_dict, "state": state, "param_groups": groups})
