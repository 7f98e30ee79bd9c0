"""``apex.optimizers``: six fused optimizers on those of :mod:`ampfuse.optim`, and that of 2019.

In common, besides torch's arguments: `bias_correction=False` uses the moments uncorrected;
`adam_w_mode` (`adagrad_w_mode`), decoupled weight decay instead of L2 through the gradient;
`set_grad_none`: ``zero_grad()`` drops gradients. `amsgrad` raises RuntimeError.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampfuse import optim
from ampfuse.compat.apex import amp_C
from ampfuse.compat.apex.optimizers import of_2019
from ampfuse.compat.apex.optimizers.of_2019 import FP16_Optimizer
from ampfuse.optim.base import under_grad_scaler
from ampfuse.optim.fused import FusedOptimizer, is_fused
from ampfuse.optim.masters import MASTERS
from ampfuse.optim.param_groups import parameters
from ampfuse.torch_utils import HALF_DTYPES

__all__ = [
    "FP16_Optimizer", "FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb",
    "FusedNovoGrad", "FusedSGD",
]  # fmt: skip

_RENAMED = dict.fromkeys(("adam_w_mode", "adagrad_w_mode"), "decoupled_weight_decay")
# Options for which apex takes any value.
_FLAGS = frozenset(
    "decoupled_weight_decay bias_correction grad_averaging init_zero reg_inside_moment "
    "use_nvlamb wd_after_momentum".split()
)
_NOT_OURS = ("params", "param_names", "step")  # of a group whose state is loaded


class ApexOptimizer(FusedOptimizer, own_step=False):
    """Mixin: ``zero_grad`` with apex's default, and state dicts of apex, torch and ampfuse.

    From the first step on ``param_groups[i]["step"]`` is there: the largest of the steps applied to
    the group's parameters, float32 and 0-dim on their device.
    """

    set_grad_none = True
    # Divides the gradients of the next step. (In apex both are attributes of FusedSGD.)
    most_recent_scale = 1.0
    scale_set_by_backward = False
    skip_by_default = False
    _not_in_groups = frozenset()  # apex's groups contain keys that are optimizer-wide options here
    _copied = (*FusedOptimizer._copied, "set_grad_none")

    # Options of ours that groups have, and our constructors do not.
    _in_groups: tuple[str, ...] = ()

    def construct(self, arguments: dict[str, Any]) -> None:
        """Run our constructor, given the ``locals()`` of apex's; `amsgrad` raises RuntimeError.

        Take `locals()` first, and use no `super()` in that constructor: they would contain
        ``__class__``.
        """
        options = {_RENAMED.get(name, name): value for name, value in arguments.items()}
        del options["self"]
        if options.pop("amsgrad", False):
            name = type(self).__name__
            raise RuntimeError(f"{name} does not support AMSGrad; ampfuse.optim.Adam does.")
        self.set_grad_none = options.pop("set_grad_none", True)
        options |= {name: bool(options[name]) for name in _FLAGS & options.keys()}
        in_groups = {name: options.pop(name) for name in self._in_groups}
        super().__init__(**options)
        for name, value in in_groups.items():
            self.set_in_groups(name, value)

    @functools.cached_property
    def _dummy_overflow_buf(self) -> Tensor:
        """The flag that ``amp_C``'s operations take; our own step has another."""
        device = next((param.device for param in parameters(self)), None)
        return torch.zeros(1, dtype=torch.int32, device=device)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        # Not super(): torch hooks the step of each class that was instantiated, and a base's hooks
        # would run a second time.
        result = FusedOptimizer.step(self, closure)
        self.most_recent_scale, self.scale_set_by_backward = 1.0, False
        if self.algorithm.uses_count:
            groups = self.param_groups
            counts = self.param_table().steps().split([len(group["params"]) for group in groups])
            for group, steps in zip(groups, counts, strict=True):
                if len(steps):
                    group["step"] = steps.amax()
        return result

    def _gradient_scale(self) -> tuple[Tensor | None, bool, bool]:
        if self.most_recent_scale == 1:
            return super()._gradient_scale()
        device = self._rows.params[0].device
        scale = torch.full((), self.most_recent_scale, dtype=torch.float32, device=device)
        scaler = self.__dict__.get("grad_scale")
        return (scale if scaler is None else scale * scaler), False, False

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients or zero them; by default as `set_grad_none` said."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads apex's, torch's and ampfuse's state dicts.

        Options that a saved group lacks stay. apex's count of a group is that of its parameters.
        """
        saved_groups = state_dict["param_groups"]
        if len(self.param_groups) != len(saved_groups):
            return super().load_state_dict(state_dict)  # torch raises the error
        state = {key: dict(value) for key, value in state_dict["state"].items()}
        groups = []
        for own, saved in zip(self.param_groups, saved_groups, strict=True):
            inherited = {k: v for k, v in own.items() if k not in _NOT_OURS}
            groups.append({**inherited, **saved})
            if is_fused(self):  # a step of a subclass's own counts by group
                self._count_by_parameter(groups[-1], state)
        super().load_state_dict({**state_dict, "state": state, "param_groups": groups})

    def _count_by_parameter(self, group: dict[str, Any], state: dict[Any, Any]) -> None:
        """Write a saved group's count into its parameters' state, unless theirs is ahead."""
        step = group.get("step", 0 if self.algorithm.uses_count else None)
        if step is None:
            return
        counts = [state[key]["step"] for key in group["params"] if "step" in state.get(key, {})]
        is_ahead = bool(counts) and step > max(counts)
        for key in group["params"]:
            # Without a moment there is nothing that a count could belong to.
            has_moments = state.get(key, {}).keys() - {*MASTERS, "step"}
            if has_moments and (is_ahead or "step" not in state[key]):
                count = torch.as_tensor(step, dtype=torch.float32).reshape(())
                state[key]["step"] = count.clone()

    def set_in_groups(self, name: str, value: Any) -> None:
        """A property of every group, of those to come too."""
        self.defaults[name] = value
        for group in self.param_groups:
            group.setdefault(name, value)


def group_option(key: str, read: Callable[[Any], Any], write: Callable[[Any], bool] = bool) -> Any:
    """An attribute of apex's optimizers that each parameter group has as an entry, new ones too."""

    def assign(self: ApexOptimizer, value: Any) -> None:
        for group in (self.defaults, *self.param_groups):
            group[key] = write(value)

    return property(lambda self: read(self.param_groups[0][key]), assign)


def stepped_by_grad_scaler(
    optimizer: Any, kwargs: dict[str, Any]
) -> contextlib.AbstractContextManager[None]:
    """A step in this block unscales and skips by torch's GradScaler ``kwargs["grad_scaler"]``.

    `step` takes it through ``**kwargs``: torch's GradScaler warns about a parameter called
    `grad_scaler`.
    """
    grad_scaler = kwargs.pop("grad_scaler", None)
    if kwargs:
        name = type(optimizer).__name__
        raise TypeError(f"{name}.step got an unexpected argument {next(iter(kwargs))!r}")
    if grad_scaler is None or not grad_scaler.is_enabled():
        return contextlib.nullcontext()
    flags = grad_scaler._check_inf_per_device(optimizer).values()
    found_inf = sum(flag.reshape(()) for flag in flags)  # 0 if the scaler saw no gradient
    grad_scale = grad_scaler._get_scale_async()
    return under_grad_scaler(optimizer, grad_scale=grad_scale, found_inf=found_inf)


# --- the six optimizers ---------------------------------------------------------------------------


class FusedAdagrad(ApexOptimizer, optim.Adagrad):
    """:class:`ampfuse.optim.Adagrad` with apex's arguments."""

    _in_groups = ("decoupled_weight_decay",)
    multi_tensor_adagrad = staticmethod(amp_C.multi_tensor_adagrad)
    adagrad_w_mode = group_option("decoupled_weight_decay", int)

    def __init__(
        self, params: Any, lr: Any = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0,
        set_grad_none: bool = True, adagrad_w_mode: Any = False,
    ) -> None:  # fmt: skip
        self.construct(locals())


class FusedAdam(of_2019.StepsAsIn2019, ApexOptimizer, optim.Adam, own_step=False):
    """:class:`ampfuse.optim.Adam` with apex's arguments; by default it is AdamW.

    Any step can be captured. With `capturable`, one that a GradScaler drives leaves half gradients
    unscaled too. `master_weights` keeps FP32 masters; without `capturable` it raises RuntimeError.
    `max_grad_norm` and other arguments of 2019 make it the FusedAdam of ``apex.contrib``.
    """

    _copied = (*ApexOptimizer._copied, "capturable", "steps_as_in_2019")
    _in_groups = ("bias_correction",)
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
        options = dict(locals())
        self.capturable = options.pop("capturable")
        if master_weights and not capturable:
            raise RuntimeError("FusedAdam supports master_weights=True only with capturable=True.")
        self.construct(options)

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
    _in_groups = ("wd_after_momentum",)
    multi_tensor_sgd = staticmethod(amp_C.multi_tensor_sgd)
    wd_after_momentum = group_option("wd_after_momentum", bool)

    def __init__(
        self, params: Any, lr: Any = None, momentum: float = 0, dampening: float = 0,
        weight_decay: float = 0, nesterov: bool = False, wd_after_momentum: Any = False,
        materialize_master_grads: bool = True, set_grad_none: bool = False,
    ) -> None:  # fmt: skip
        options = dict(locals())
        self.materialize_master_grads = options.pop("materialize_master_grads")
        self.requires_lr = lr is None
        self.construct(options | {"lr": 0.0 if lr is None else lr})

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
        options = dict(locals())
        is_unclipped = max_grad_norm in (None, math.inf)
        # 0 would mean no clipping to our constructor. The smallest normal double is 0 in FP32 and
        # zeroes all gradients, as in apex.
        options["max_grad_norm"] = None if is_unclipped else max_grad_norm or sys.float_info.min
        self.construct(options)
        # As in apex, groups have the norm that was asked for. A step reads that of the optimizer.
        self.set_in_groups("max_grad_norm", max_grad_norm)


class FusedMixedPrecisionLamb(FusedLAMB, own_step=False):
    """:class:`FusedLAMB` with FP32 masters, for a loop with torch's GradScaler.

    Step counts start from `step`. Half parameters have masters if `reduced_precision_dtype` is
    given; it may be set later, before the first step.
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
        options = amsgrad, adam_w_mode, grad_averaging, True, max_grad_norm, use_nvlamb
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, *options)
        self.skip_nonfinite = True
        self.reduced_precision_dtype = reduced_precision_dtype

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
        self.construct(locals())

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
