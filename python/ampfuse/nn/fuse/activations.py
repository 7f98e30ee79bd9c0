"""GELU and SiLU: what a fused model calls in place of them, and how a graph gets it.

An activation takes with it the bias of the linear layer before it, if nothing else reads the value
between them (``linear_act``), or else the product that alone reads its result, as of a gate
(``act_mul``), or runs by itself (``alone``).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ampfuse.nn.functional import bias_act, gated_act, same_shape_and_dtype
from ampfuse.nn.fuse.forwards import class_of, forward_name, module_of
from ampfuse.nn.fuse.trace import between, called, is_reader, replace

# By the name of the ``forward``, for the activations in transformers and timm's layers.
_ACTIVATIONS = {
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
_MIN_COLUMNS = 16  # a shorter row is less than a vector
_PRODUCTS = (operator.mul, torch.mul, "mul")


def activation_of(module: nn.Module) -> str | None:
    """The name of the activation that `module` computes; None if it has no fused form, for example
    because it works in place."""
    if getattr(module, "inplace", False):
        return None
    if class_of(module).forward is nn.GELU.forward:
        return _GELUS.get(getattr(module, "approximate", ""))
    return _ACTIVATIONS.get(forward_name(module))


def _activation_of_call(function: Any, kwargs: dict[str, Any]) -> str | None:
    """The activation that `function` computes of one argument and `kwargs`; None if not fused."""
    if function is F.gelu and kwargs.keys() <= {"approximate"}:
        return _GELUS.get(kwargs.get("approximate", "none"))
    return "silu" if function is F.silu and not kwargs.get("inplace", False) else None


def _is_linear(module: nn.Module) -> bool:
    """Whether `module` multiplies by a weight and may add a bias."""
    return _is_conv1d(module) or type(module) is nn.Linear


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is the linear layer of GPT-2, whose weight is transposed."""
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


# ---- in place of modules -------------------------------------------------------------------------


def linear_act(linear: Any, act: nn.Module | str, x: Tensor) -> Tensor:
    """``act(linear(x))``, fused if possible.

    Arguments:
        act: an activation, or the name of one that is not a module.
    """
    name = act if isinstance(act, str) else activation_of(act)
    if name is None or torch.compiler.is_compiling():  # a compiler fuses them with more than we do
        y = linear(x)
        return _BY_TORCH[act](y) if isinstance(act, str) else act(y)
    weight = linear.weight.t() if _is_conv1d(linear) else linear.weight
    return bias_act(F.linear(x, weight), linear.bias, name)


def act_mul(act: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    """``act(gate) * up``, fused if possible."""
    name = activation_of(act)
    fits = not torch.compiler.is_compiling() and same_shape_and_dtype(gate, up)
    return gated_act(gate, up, name) if name is not None and fits else act(gate) * up


def alone(act: nn.Module, x: Tensor) -> Tensor | None:
    """``act(x)``, fused; None if that is not possible."""
    name = activation_of(act)
    if name is None or torch.compiler.is_compiling() or x.shape[-1:] < (_MIN_COLUMNS,):
        return None
    return bias_act(x, None, name)


# ---- in a graph ----------------------------------------------------------------------------------


def rewrite(graph: fx.Graph, root: nn.Module) -> dict[str, str]:
    """Fuse the activations that `graph`, of a forward of `root`, calls after a bias or before a
    product.

    Returns:
        For each, by its path in `root` or that of the layer before it, what it was fused with.
    """
    fused = {}
    for node in list(graph.nodes):
        act = module_of(node, root)
        if act is not None:
            name = activation_of(act)
        else:
            unary = node.op == "call_function" and len(node.args) == 1
            name = _activation_of_call(node.target, node.kwargs) if unary else None
        if name is None:
            continue
        if (linear := _linear_before(node, root)) is not None:
            with graph.inserting_before(linear):
                layer = graph.get_attr(str(linear.target))
                what = name if act is None else graph.get_attr(str(node.target))
                both = graph.call_function(linear_act, (layer, what, linear.args[0]))
            replace(node, both)
            graph.erase_node(linear)
            place = (linear if act is None else node).target
            fused[str(place)] = f"with {name}" if act is None else "with bias"
        elif act is not None and (product := _product_after(node, root)) is not None:
            (up,) = (arg for arg in product.args if arg is not node)
            with graph.inserting_before(product):
                module = graph.get_attr(str(node.target))
                both = graph.call_function(act_mul, (module, node.args[0], up))
            replace(product, both)
            graph.erase_node(node)
            fused[str(node.target)] = "with product"
    return fused


def _linear_before(act: fx.Node, root: nn.Module) -> fx.Node | None:
    """The call of a linear layer with a bias whose result only `act` reads."""
    (x,) = act.args
    if not isinstance(x, fx.Node) or list(x.users) != [act]:
        return None
    layer = module_of(x, root)
    has_bias = layer is not None and _is_linear(layer) and layer.bias is not None
    return x if has_bias else None


def _product_after(act: fx.Node, root: nn.Module) -> fx.Node | None:
    """The product that alone reads the result of `act`, if `act` may be computed there."""
    users = list(act.users)
    if len(users) != 1 or called(users[0]) not in _PRODUCTS or users[0].kwargs:
        return None
    product = users[0]
    if len(product.args) != 2 or not all(isinstance(arg, fx.Node) for arg in product.args):
        return None
    for node in between(act, product):  # they must leave the operand of `act` as it is
        module = module_of(node, root)
        if module is None or not is_reader(module):
            return None
    return product if product.args[0] is not product.args[1] else None
