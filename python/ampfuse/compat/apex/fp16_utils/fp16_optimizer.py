"""``FP16_Optimizer``, an optimizer with masters and a loss scale of its own, in both kinds of apex.

Their state dicts have apex's keys, holding plain data and no objects. Each loads both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from ampfuse import half_ops
from ampfuse.amp.policy import O2
from ampfuse.amp.scale_loss import scaled_pass
from ampfuse.compat.apex.amp._amp_state import AmpOptimizerState
from ampfuse.compat.apex.amp.scaler import LossScaler
from ampfuse.compat.apex.apex_C import unflatten
from ampfuse.optim import upgrade
from ampfuse.optim.masters import MasterParameter
from ampfuse.optim.param_groups import check_optimizer, parameters
from ampfuse.torch_utils import FLOAT_DTYPES, HALF_DTYPES


def delegated_to(owner: str, name: str) -> Any:
    """The attribute `name` of ``self.owner``, to read and to assign."""
    return property(
        lambda self: getattr(getattr(self, owner), name),
        lambda self, value: setattr(getattr(self, owner), name, value),
    )


# An Optimizer, unlike apex's: learning-rate schedulers ask for one. Everything but what is defined
# here is the wrapped optimizer's, so Optimizer.__init__ is not called.
class FP16_Optimizer(torch.optim.Optimizer):
    """Wraps any ``torch.optim.Optimizer`` of half parameters; it steps FP32 masters of them.

    The optimizer, then ``optimizer``, is changed in place: masters replace half parameters, and it
    becomes a subclass of its class. A trainable parameter that is neither float32, float16 nor
    bfloat16 raises TypeError. ``optimizer.backward(loss)`` takes the place of ``loss.backward()``.

    A static scale never skips. `dynamic_loss_args` are ``init_scale``, ``scale_factor``,
    ``scale_window``, ``min_loss_scale``, ``max_loss_scale`` of :class:`ampfuse.amp.LossScaler`.
    `verbose` has no effect: read ``overflow``. ``fp16_groups``, ``fp32_from_fp16_groups`` and
    ``fp32_from_fp32_groups`` are half parameters, their masters, and FP32 parameters, as lists of
    lists; flat under ``all_fp16_params`` and so on.
    """

    _scaling_defaults: Mapping[str, Any] = MappingProxyType({})
    _skips_at_static_scale = False

    def __init__(
        self, init_optimizer: torch.optim.Optimizer, static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False, dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:  # fmt: skip
        check_optimizer(init_optimizer, "FP16_Optimizer(optimizer)")
        inner = init_optimizer
        self._dynamic_loss_args = {**self._scaling_defaults, **(dynamic_loss_args or {})}
        for param in parameters(inner):
            if param.requires_grad and param.dtype not in FLOAT_DTYPES:
                raise TypeError(
                    f"A parameter of shape {tuple(param.shape)} is {param.dtype}; it must be "
                    "float16, bfloat16 or float32."
                )
        scaler = self._make_scaler(dynamic_loss_scale, static_loss_scale)
        if any(p.is_cpu and p.dtype in HALF_DTYPES for p in parameters(inner)):
            half_ops.enable_for(O2)
        upgrade(inner, master_weights=True)
        self.optimizer: Any = inner
        self._lists = AmpOptimizerState(inner)
        self.verbose = verbose
        self.first_closure_call_this_step = True  # always, as between apex's steps
        self.overflow = False
        self.set_loss_scaler(scaler)

    def _make_scaler(self, is_dynamic: bool, static_scale: float) -> LossScaler:
        if is_dynamic:
            return LossScaler("dynamic", **self._dynamic_loss_args)
        return LossScaler(static_scale)

    def set_loss_scaler(self, scaler: LossScaler) -> None:
        """Use `scaler` from now on; a dynamic one makes overflows skip the step."""
        self.loss_scaler = scaler
        self.dynamic_loss_scale = scaler.dynamic
        self.optimizer.skip_on_overflow = scaler.dynamic or self._skips_at_static_scale

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "_lists"):  # not there yet
            raise AttributeError(name)
        source = self._lists if hasattr(type(self._lists), name) else self.optimizer
        return getattr(source, name)

    def zero_grad(  # type: ignore[override]
        self, set_grads_to_None: bool = False, set_to_none: bool | None = None
    ) -> None:
        """Zero the gradients of masters and model, or drop them; both names mean the same."""
        drop = set_grads_to_None if set_to_none is None else set_to_none
        self.optimizer.zero_grad(set_to_none=drop)
        self.optimizer.found_inf_flag.zero_()

    def backward(
        self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """``loss.backward()`` with the loss scaled; several calls add up.

        With ``update_master_grads=False`` the gradients stay scaled until a call without it, or
        until :meth:`update_master_grads`.
        """
        inner, delay = [self.optimizer], not update_master_grads
        with scaled_pass(loss, inner, self.loss_scaler, delay, False) as scaled:
            scaled.backward(retain_graph=retain_graph)
        if update_master_grads:
            self._remember_overflow()

    def update_master_grads(self) -> None:
        """Unscale gradients that are new, look for overflow and adapt the scale; else nothing."""
        optimizer, scaler = self.optimizer, self.loss_scaler
        device = optimizer.param_table().param(0).device
        if optimizer.has_scaled_gradients:
            with scaled_pass(torch.zeros((), device=device), [optimizer], scaler, False, False):
                pass
        elif optimizer.param_table().gradients.has_gradient_from_outside():
            # From the user's own backward of loss * optimizer.loss_scale.
            optimizer.end_backward(scaler.snapshot(device), scaler.dynamic)
            scaler.update([optimizer.found_inf_flag])
        self._remember_overflow()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and round them into the model; nothing after an overflow.

        A closure has to call this object's ``zero_grad`` and ``backward`` and return the loss. It
        is repeated while it overflows; at the smallest scale it raises RuntimeError.
        """
        if closure is None:
            return None if self._skip_next else self.optimizer.step()

        # The wrapped step brings the model up to the masters before each evaluation.
        def repeated() -> Any:
            while True:
                scale, loss = self.loss_scale, closure()
                if not self.overflow:
                    return loss
                if self.loss_scale >= scale:
                    raise RuntimeError(
                        f"The closure overflows at a loss scale of {scale}, the smallest allowed. "
                        "The inf or NaN is in the forward pass or in the loss itself."
                    )
                self.optimizer.found_inf_flag.zero_()

        return self.optimizer.step(repeated)

    def _remember_overflow(self) -> None:
        flag = self.optimizer.found_inf_flag
        self._overflow = flag.clone() if self.loss_scaler.dynamic else torch.zeros(())
        self._skip_next = False  # the wrapped optimizer knows

    @property
    def overflow(self) -> bool:
        """Whether the latest gradients overflowed a dynamic scale. Reading it synchronizes."""
        return bool(self._overflow)

    @overflow.setter
    def overflow(self, value: Any) -> None:
        self._overflow = torch.tensor(float(bool(value)))
        self._skip_next = bool(value)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Any:
        """Clip the FP32 gradients to `max_norm`; their norm before, or -1 after an overflow."""
        clip = torch.nn.utils.clip_grad_norm_
        return -1 if self.overflow else clip(parameters(self), max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """The FP32 gradients, in a list for each group. After an overflow: None, and a message."""
        if self.overflow:
            print("The latest gradients overflowed: there are no master gradients to look at.")
            return None
        grads = ([param.grad for param in group["params"]] for group in self.param_groups)
        return [[None if grad is None else grad.detach() for grad in group] for group in grads]

    loss_scale = delegated_to("loss_scaler", "_loss_scale")
    state = delegated_to("optimizer", "state")
    param_groups = delegated_to("optimizer", "param_groups")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """apex's keys, for ``weights_only=True``; ``fp32_from_fp16`` holds the masters."""
        scaler = self.loss_scaler
        return {
            "loss_scaler": {**scaler.state_dict(), "dynamic": scaler.dynamic},
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[p.detach() for p in group] for group in self.fp32_from_fp16_groups],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what either class or apex saved, in place; ValueError if for another model."""
        state = _unflattened(self, state_dict) if "fp32_groups_flat" in state_dict else state_dict
        own, saved = self.fp32_from_fp16_groups, state.get("fp32_from_fp16")
        if saved is None:  # the class of apex.optimizers
            own, saved = [group["params"] for group in self.param_groups], state["fp32_groups"]
        params = [param for group in own for param in group]
        values = [value for group in saved for value in group]
        _check_sizes([p.shape for p in params], [value.shape for value in values])
        scaling, dynamic = _scaling(state.get("loss_scaler", state)), state["dynamic_loss_scale"]
        LossScaler.check_state(scaling)
        self.optimizer.load_state_dict(state["optimizer_state_dict"])
        for param, value in zip(params, values, strict=True):
            if isinstance(param, MasterParameter):
                exact = value.detach().to(device=param.device, dtype=param.dtype, copy=True)
                self.optimizer.restore_master(param, {}, exact)
            else:
                param.copy_(value)
        if bool(dynamic) != self.dynamic_loss_scale:
            self.set_loss_scaler(self._make_scaler(dynamic, scaling["loss_scale"]))
        self.loss_scaler.load_state_dict(scaling)
        if self.dynamic_loss_scale and "scale_window" in state:
            self.loss_scaler._scale_seq_len = state["scale_window"]
            self.loss_scaler._scale_factor = state["scale_factor"]
        self.overflow = state.get("overflow", False)

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError("FP16_Optimizer cannot be pickled; save its state_dict() instead.")


class LegacyFP16Optimizer(FP16_Optimizer):
    """``FP16_Optimizer`` of ``apex.optimizers`` and ``apex.contrib.optimizers``.

    A dynamic scale, ``cur_scale``, grows after 1000 clean passes and is at least 1. An overflow of
    a static one skips the step too. ``zero_grad`` drops gradients. A user-defined step that takes
    ``grad_norms``, as that of 2019's FusedAdam does, gets the norm of each group.
    """

    _scaling_defaults = MappingProxyType({"scale_window": 1000, "min_loss_scale": 1.0})
    _skips_at_static_scale = True

    def zero_grad(  # type: ignore[override]
        self, set_grads_to_None: bool = True, set_to_none: bool | None = None
    ) -> None:
        super().zero_grad(set_grads_to_None, set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        own_step = getattr(getattr(self.optimizer, "_original_class", None), "step", None)
        takes_norms = own_step and "grad_norms" in inspect.signature(own_step).parameters
        if closure or not takes_norms or self._skip_next:
            return super().step(closure)
        grads = [[p.grad for p in group if p.grad is not None] for group in self.fp32_groups]
        return self.optimizer.step(grad_norms=list(map(get_total_norm, grads)))

    cur_scale = FP16_Optimizer.loss_scale

    @property
    def fp32_groups(self) -> list[list[Tensor]]:
        return [group["params"] for group in self.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The keys that this class had; ``fp32_groups`` are all that is stepped."""
        return {
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "cur_scale": self.cur_scale,
            "cur_iter": self.loss_scaler._unskipped,  # since an overflow before the first
            "last_overflow_iter": -1,
            "scale_factor": self.loss_scaler._scale_factor,
            "scale_window": self.loss_scaler._scale_seq_len,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_groups": [[p.detach() for p in group] for group in self.fp32_groups],
        }


# Scripts look at the names of classes.
LegacyFP16Optimizer.__name__ = LegacyFP16Optimizer.__qualname__ = FP16_Optimizer.__name__


# --- state dicts of apex --------------------------------------------------------------------------


def _scaling(saved: Any) -> dict[str, Any]:
    """The state of a scaler, which may have been saved as an object or as its attributes."""
    if isinstance(saved, LossScaler):
        return saved.state_dict()
    state = saved if isinstance(saved, dict) else vars(saved)
    if "cur_scale" not in state:
        return state
    since = 0  # the older scalers
    if "last_overflow_iter" in state:
        since = (state["cur_iter"] - state["last_overflow_iter"] - 1) % state["scale_window"]
    return {"loss_scale": state["cur_scale"], "unskipped": since}


def _check_sizes(own: list[Any], saved: list[Any]) -> None:
    if own != saved:
        raise ValueError(
            f"The state holds {len(saved)} master weights, this optimizer has {len(own)}, or "
            "their shapes differ: it was saved from another model. Nothing was loaded."
        )


def _unflattened(optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A state dict that apex saved in 2018, with one flat master and flat moments per group."""
    inner, first = state["optimizer_state_dict"], 0
    states: dict[int, dict[str, Any]] = {}
    groups, masters = [], []
    rows = inner["param_groups"], state["fp32_groups_flat"], optimizer.param_groups
    own_sizes = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
    _check_sizes(own_sizes, [flat.numel() for flat in state["fp32_groups_flat"]])
    for group, flat, own in zip(*rows, strict=True):
        params = own["params"]
        keys = range(first, first := first + len(params))
        masters.append(unflatten(flat, params))
        groups.append({**group, "params": list(keys)})
        for name, value in inner["state"].get(group["params"][0], {}).items():
            is_flat = getattr(value, "shape", None) == flat.shape
            parts = unflatten(value, params) if is_flat else [value] * len(params)
            for key, part in zip(keys, parts, strict=True):
                states.setdefault(key, {})[name] = part
    inner = {"state": states, "param_groups": groups}
    return {**state, "optimizer_state_dict": inner, "fp32_groups": masters}
