"""What stands in for the activations of a model that is fused, and for what is beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampfuse.nn.activation import bias_act, gated_act
from ampfuse.nn.norm_act import are_bare, mark_fused

# By where a ``forward`` was written, in transformers' module of activations and in timm's layers.
_CURVES = {
    "torch.nn.modules.activation.SiLU.forward": "silu",
    "timm.layers.activations.GELU.forward": "gelu",
    "timm.layers.activations.GELUTanh.forward": "gelu_tanh",
    "timm.layers.activations.Swish.forward": "silu",
    "transformers.activations.GELUActivation.forward": "gelu",
    "transformers.activations.GELUTanh.forward": "gelu_tanh",
    "transformers.activations.NewGELUActivation.forward": "gelu_tanh",
    "transformers.activations.FastGELUActivation.forward": "gelu_tanh",
    "transformers.activations.SiLUActivation.forward": "silu",
}
_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}
_BY_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
_FEWEST = 16  # columns; of fewer a row is less than a vector


def curve_of(act: nn.Module) -> str | None:
    """The fused form of `act`; None if there is none, as of one that works in place."""
    if getattr(act, "inplace", False):
        return None
    written = type(act).forward
    if written is nn.GELU.forward:
        return _GELUS.get(getattr(act, "approximate", ""))
    return _CURVES.get(f"{written.__module__}.{written.__qualname__}")


def curve_of_call(function: Any, kwargs: dict[str, Any]) -> str | None:
    """As :func:`curve_of`, of a call of a function with one argument and `kwargs`."""
    if function is F.gelu and kwargs.keys() <= {"approximate"}:
        return _GELUS.get(kwargs.get("approximate", "none"))
    return "silu" if function is F.silu and not kwargs.get("inplace", False) else None


def is_linear(module: nn.Module) -> bool:
    """Whether `module` is a product with a weight and the addition of a bias."""
    return _has_rows(module) or type(module) is nn.Linear


def _has_rows(module: nn.Module) -> bool:
    """Whether it is the layer of GPT-2, whose weight has a row for each input."""
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def linear_act(linear: Any, act: nn.Module | str, x: Tensor) -> Tensor:
    """``act(linear(x))``, fused if the modules are now what they seemed to be.

    Arguments:
        act: an activation, or the name of one that is no module.
    """
    curve = act if isinstance(act, str) else curve_of(act)
    bare = (linear,) if isinstance(act, str) else (linear, act)
    left = torch.compiler.is_compiling()  # a compiler fuses them with more than we do
    fits = is_linear(linear) and linear.bias is not None and are_bare(bare)
    if curve is None or left or not fits:
        y = linear(x)
        if not isinstance(act, str):
            return act(y)
        return _BY_TORCH[act](y) if left else bias_act(y, None, act)
    weight = linear.weight.t() if _has_rows(linear) else linear.weight
    return bias_act(F.linear(x, weight), linear.bias, curve)


def act_mul(act: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    """``act(gate) * up``, fused if `act` is still what it seemed to be."""
    curve = curve_of(act)
    alike = gate.shape == up.shape and gate.dtype == up.dtype
    if curve is None or torch.compiler.is_compiling() or not alike or not are_bare((act,)):
        return act(gate) * up
    return gated_act(gate, up, curve)


@mark_fused
def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The ``forward`` that an activation by itself gets."""
    curve = curve_of(self)
    usual = len(args) == 1 and not kwargs and not torch.compiler.is_compiling()
    if curve is None or not usual or args[0].shape[-1] < _FEWEST:
        return type(self).forward(self, *args, **kwargs)
    return bias_act(args[0], None, curve)
