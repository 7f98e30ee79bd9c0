"""``apex.optimizers``: six fused optimizers on those of :mod:`ampfuse.optim`, and FP16_Optimizer.

In common, besides torch's arguments: `bias_correction=False` uses the moments uncorrected;
`adam_w_mode` (`adagrad_w_mode`), decoupled weight decay instead of L2 through the gradient;
`set_grad_none`: ``zero_grad()`` drops gradients. `amsgrad` raises RuntimeError.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ampfuse import optim
from ampfuse.compat.apex import amp_C
from ampfuse.compat.apex.fp16_utils.fp16_optimizer import LegacyFP16Optimizer as FP16_Optimizer
from ampfuse.compat.apex.optimizers.base import ApexOptimizer, group_option, stepped_by_grad_scaler
from ampfuse.optim.fused import is_fused
from ampfuse.torch_utils import HALF_DTYPES

__all__ = [
    "FP16_Optimizer", "FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb",
    "FusedNovoGrad", "FusedSGD",
]  # fmt: skip


class FusedAdagrad(ApexOptimizer, optim.Adagrad):
    """:class:`ampfuse.optim.Adagrad` with apex's arguments."""

    multi_tensor_adagrad = staticmethod(amp_C.multi_tensor_adagrad)
    adagrad_w_mode = group_option("decoupled_weight_decay", int)

    def __init__(
        self, params: Any, lr: Any = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0,
        set_grad_none: bool = True, adagrad_w_mode: Any = False,
    ) -> None:  # fmt: skip
        super().__init__(
            params, set_grad_none=set_grad_none, lr=lr, eps=eps, weight_decay=weight_decay
        )
        self.set_in_groups("decoupled_weight_decay", bool(adagrad_w_mode))


class FusedAdam(ApexOptimizer, optim.Adam, own_step=False):
    """:class:`ampfuse.optim.Adam` with apex's arguments; by default it is AdamW.

    Any step can be captured. With `capturable`, one that a GradScaler drives leaves half gradients
    unscaled too. `master_weights` keeps FP32 masters; without `capturable` it raises RuntimeError.

    The last four arguments are of 2019. With any of them the corrections of the moments are a
    factor of the rate, and so of the weight decay, and the gradients of each group are clipped to
    the L2 norm `max_grad_norm`, unless that is 0. `eps_inside_sqrt` raises RuntimeError.
    """

    _copied = (*ApexOptimizer._copied, "capturable", "is_legacy")
    multi_tensor_adam = staticmethod(amp_C.multi_tensor_adam)
    multi_tensor_adam_capturable = staticmethod(amp_C.multi_tensor_adam_capturable)
    multi_tensor_adam_capturable_master = staticmethod(amp_C.multi_tensor_adam_capturable_master)
    adam_w_mode = group_option("decoupled_weight_decay", int)

    def __init__(
        self, params: Any, lr: Any = 1e-3, bias_correction: Any = True, betas: Any = (0.9, 0.999),
        eps: float = 1e-8, adam_w_mode: Any = True, weight_decay: float = 0.0,
        amsgrad: Any = False, set_grad_none: bool = True, capturable: bool = False,
        master_weights: Any = False, *, eps_inside_sqrt: Any = None, max_grad_norm: Any = None,
        use_mt: Any = None, amp_scale_adjustment: Any = None,
    ) -> None:  # fmt: skip
        if master_weights and not capturable:
            raise RuntimeError("FusedAdam supports master_weights=True only with capturable=True.")
        if eps_inside_sqrt:
            raise RuntimeError(
                "FusedAdam only adds eps outside of the square root, as torch does. Use "
                "fused_adam_cuda.adam with eps_mode=0."
            )
        legacy = eps_inside_sqrt, max_grad_norm, use_mt, amp_scale_adjustment
        self.is_legacy = any(value is not None for value in legacy)
        self.capturable = capturable
        super().__init__(
            params, amsgrad=amsgrad, set_grad_none=set_grad_none, lr=lr, betas=betas, eps=eps,
            weight_decay=weight_decay, decoupled_weight_decay=bool(adam_w_mode),
            master_weights=master_weights,
        )  # fmt: skip
        self.set_in_groups("bias_correction", bool(bias_correction))
        if self.is_legacy:
            self.set_in_groups("max_grad_norm", max_grad_norm or 0.0)

    _unscales_half = property(lambda self: self.capturable)

    def step(
        self, closure: Callable[[], Any] | None = None, grads: Any = None,
        output_params: Any = None, scale: Any = None, grad_norms: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """One step. ``step(grad_scaler=s)`` unscales, and skips on overflow, by torch's GradScaler.

        The arguments in the middle, which apex gave up, raise RuntimeError.
        """
        gone = {"grads": grads, "output_params": output_params}
        gone |= {"scale": scale, "grad_norms": grad_norms}
        if refused := [name for name, value in gone.items() if value is not None]:
            raise RuntimeError(
                f"FusedAdam.step has no {', '.join(refused)}: gradients are read from .grad, and "
                "amp or a GradScaler unscales them."
            )
        with stepped_by_grad_scaler(self, kwargs):
            return super().step(closure)

    def _collect(self) -> Any:
        if not self.is_legacy:
            return super()._collect()
        groups = self.param_groups
        _clip_each_group(self)
        rates = [(group["lr"], group["bias_correction"]) for group in groups]
        counts = self.ensure_bound().steps().split([len(group["params"]) for group in groups])
        try:
            for group, count in zip(groups, counts, strict=True):
                if group["bias_correction"] and len(count):
                    left = [1 - beta ** (count.amax().double() + 1) for beta in group["betas"]]
                    group["lr"] = (group["lr"] * left[1].sqrt() / left[0]).float()
                    group["bias_correction"] = False
            return super()._collect()
        finally:
            for group, (lr, corrects) in zip(groups, rates, strict=True):
                group.update(lr=lr, bias_correction=corrects)


def _clip_each_group(adam: Any) -> None:
    norms = [group["max_grad_norm"] for group in adam.param_groups]
    if len(norms) == 1 and norms[0] > 0:
        adam.clip_once = float(norms[0])  # without a pass of its own
        return
    scale = adam.most_recent_scale * adam.__dict__.get("grad_scale", 1.0)
    for group, norm in zip(adam.param_groups, norms, strict=True):
        if norm > 0:
            grads = [p.grad.float() for p in group["params"] if p.grad is not None]
            clip_grads_with_norm_(group["params"], norm * scale, get_total_norm(grads))


class FusedSGD(ApexOptimizer, optim.SGD, own_step=False):
    """:class:`ampfuse.optim.SGD` with apex's arguments.

    `lr` is required, here or in every group (ValueError). `step` divides the gradients by
    ``most_recent_scale``, which is 1 again after it. `wd_after_momentum` adds the weight decay
    after the momentum instead of before it. `materialize_master_grads` has no effect.
    """

    _copied = (
        *ApexOptimizer._copied,
        *"materialize_master_grads most_recent_scale scale_set_by_backward requires_lr".split(),
    )
    multi_tensor_sgd = staticmethod(amp_C.multi_tensor_sgd)
    wd_after_momentum = group_option("wd_after_momentum", bool)

    def __init__(
        self, params: Any, lr: Any = None, momentum: float = 0, dampening: float = 0,
        weight_decay: float = 0, nesterov: bool = False, wd_after_momentum: Any = False,
        materialize_master_grads: bool = True, set_grad_none: bool = False,
    ) -> None:  # fmt: skip
        self.materialize_master_grads = materialize_master_grads
        self.requires_lr = lr is None
        super().__init__(
            params, set_grad_none=set_grad_none, lr=0.0 if lr is None else lr, momentum=momentum,
            dampening=dampening, weight_decay=weight_decay, nesterov=nesterov,
        )  # fmt: skip
        self.set_in_groups("wd_after_momentum", bool(wd_after_momentum))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which must have `lr` if the constructor got none (ValueError)."""
        if self.requires_lr and isinstance(param_group, dict) and "lr" not in param_group:
            raise ValueError("FusedSGD needs a learning rate: pass lr, here or for all groups.")
        super().add_param_group(param_group)


class FusedLAMB(ApexOptimizer, optim.LAMB):
    """:class:`ampfuse.optim.LAMB` with apex's arguments.

    Gradients are clipped to the L2 norm `max_grad_norm` first, unless that is inf. As in apex 0 is
    a norm like any other, to which all gradients become zero.
    """

    multi_tensor_l2norm = staticmethod(amp_C.multi_tensor_l2norm)
    multi_tensor_lamb: Any = staticmethod(amp_C.multi_tensor_lamb)
    adam_w_mode = group_option("decoupled_weight_decay", int)
    use_nvlamb = group_option("use_nvlamb", bool)

    def __init__(
        self, params: Any, lr: Any = 1e-3, bias_correction: Any = True, betas: Any = (0.9, 0.999),
        eps: float = 1e-6, weight_decay: float = 0.01, amsgrad: Any = False,
        adam_w_mode: Any = True, grad_averaging: Any = True, set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0, use_nvlamb: Any = False,
    ) -> None:  # fmt: skip
        is_unclipped = max_grad_norm in (None, math.inf)
        # 0 would mean no clipping to our constructor. The smallest normal double is 0 in FP32 and
        # zeroes all gradients, as in apex.
        largest = None if is_unclipped else max_grad_norm or sys.float_info.min
        super().__init__(
            params, amsgrad=amsgrad, set_grad_none=set_grad_none, lr=lr, betas=betas, eps=eps,
            weight_decay=weight_decay, bias_correction=bool(bias_correction),
            grad_averaging=bool(grad_averaging), decoupled_weight_decay=bool(adam_w_mode),
            use_nvlamb=bool(use_nvlamb), max_grad_norm=largest,
        )  # fmt: skip
        # As in apex, groups have the norm that was asked for. A step reads that of the optimizer.
        self.set_in_groups("max_grad_norm", max_grad_norm)


class FusedMixedPrecisionLamb(FusedLAMB, own_step=False):
    """:class:`FusedLAMB` with FP32 masters, for a loop with torch's GradScaler.

    Step counts start from `step`. The `lr` and `step` of a group are tensors on its device, the
    group's own: schedules may write into `lr`; what is written into `step` has no effect. Half
    parameters have masters if `reduced_precision_dtype` is given; it may be set later, before the
    first step.
    """

    _copied = (*FusedLAMB._copied, "_first_step", "_reduced_precision_dtype")
    multi_tensor_l2norm = staticmethod(amp_C.multi_tensor_l2norm_mp)
    multi_tensor_lamb = staticmethod(amp_C.multi_tensor_lamb_mp)

    def __init__(
        self, params: Any, lr: Any = 1e-3, step: int = 0, bias_correction: Any = True,
        betas: Any = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.01,
        amsgrad: Any = False, adam_w_mode: Any = True, grad_averaging: Any = True,
        max_grad_norm: float | None = 1.0, use_nvlamb: Any = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self._first_step = int(step)
        super().__init__(
            params, lr=lr, bias_correction=bias_correction, betas=betas, eps=eps,
            weight_decay=weight_decay, amsgrad=amsgrad, adam_w_mode=adam_w_mode,
            grad_averaging=grad_averaging, max_grad_norm=max_grad_norm, use_nvlamb=use_nvlamb,
        )  # fmt: skip
        self.skip_nonfinite = True
        self.reduced_precision_dtype = reduced_precision_dtype

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group."""
        super().add_param_group(param_group)
        self._make_tensors(self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads apex's, torch's and ampfuse's state dicts."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            self._make_tensors(group)

    def _make_tensors(self, group: dict[str, Any]) -> None:
        device = next((param.device for param in group["params"]), None)
        for name, value in (("lr", group["lr"]), ("step", group.get("step", self._first_step))):
            group[name] = torch.as_tensor(value, dtype=torch.float32, device=device).clone()

    def _set_dtype(self, dtype: torch.dtype | None) -> None:
        self._reduced_precision_dtype, self.master_weights = dtype, dtype is not None

    reduced_precision_dtype = property(lambda self: self._reduced_precision_dtype, _set_dtype)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """One step; with ``grad_scaler=s`` torch's GradScaler unscales and skips on overflow."""
        with stepped_by_grad_scaler(self, kwargs):
            return ApexOptimizer.step(self, closure)


class FusedNovoGrad(ApexOptimizer, optim.NovoGrad):
    """:class:`ampfuse.optim.NovoGrad` with apex's arguments.

    `norm_type` is 2, or 0 for the largest magnitude; another raises RuntimeError.
    """

    multi_tensor_novograd = staticmethod(amp_C.multi_tensor_novograd)
    moment_mode = group_option(
        "reg_inside_moment", lambda inside: 0 if inside else 1, lambda mode: mode == 0
    )

    def __init__(
        self, params: Any, lr: Any = 1e-3, bias_correction: Any = True, betas: Any = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: Any = False,
        reg_inside_moment: Any = False, grad_averaging: Any = True, norm_type: int = 2,
        init_zero: Any = False, set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        if norm_type not in (0, 2):
            problem = f"norm_type must be 0 (maximum) or 2, not {norm_type}"
            raise RuntimeError(f"FusedNovoGrad: {problem}")
        super().__init__(
            params, amsgrad=amsgrad, set_grad_none=set_grad_none, lr=lr, betas=betas, eps=eps,
            weight_decay=weight_decay, bias_correction=bool(bias_correction),
            grad_averaging=bool(grad_averaging), norm_type=norm_type, init_zero=bool(init_zero),
            reg_inside_moment=bool(reg_inside_moment),
        )  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads apex's and ampfuse's state dicts; ValueError for norms of other parameters.

        apex kept the norms in the group: those of its half parameters, then of the others, for
        parameters that had a gradient.
        """
        state = {key: dict(value) for key, value in state_dict["state"].items()}
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group, own in zip(groups, self.param_groups, strict=False):
            norms = group.pop("exp_avg_sq", None) if is_fused(self) else None
            if norms is None or len(group["params"]) != len(own["params"]):
                continue  # groups that do not fit are torch's to refuse
            are_half = [param.dtype in HALF_DTYPES for param in own["params"]]
            for is_half, values in zip((True, False), norms, strict=True):
                pairs = zip(group["params"], are_half, strict=True)
                keys = [key for key, half in pairs if half == is_half and key in state]
                _write_norms(state, keys, values)
        super().load_state_dict({**state_dict, "state": state, "param_groups": groups})


def _write_norms(state: dict[Any, Any], keys: list[Any], norms: Tensor) -> None:
    """Write `norms` into the states of the parameters `keys`; ValueError if not as many."""
    if len(keys) != len(norms):
        raise ValueError(
            f"The state has norms of {len(norms)} parameters, the optimizer has {len(keys)}. "
            "Nothing was loaded."
        )
    for key, norm in zip(keys, norms, strict=True):
        state[key]["exp_avg_norm"] = norm.detach().clone()
