"""Activations and what is beside them, in the graph of a forward, as single calls.

One takes with it the bias of the linear layer before it, if nobody else sees what is between them
(``linear_act``), or else the product that its result is for, as of a gate (``act_mul``).
"""

from __future__ import annotations

import operator

import torch
from torch import fx, nn

from ampfuse.nn.fuse.activations import act_mul, curve_of, curve_of_call, is_linear, linear_act
from ampfuse.nn.fuse.norms import called, is_reader, module_of

_PRODUCTS = (operator.mul, torch.mul, "mul")


def fuse_activations(graph: fx.Graph, root: nn.Module) -> dict[str, str]:
    """Rewrite the activations that `graph`, of a forward of `root`, calls with something beside
    them.

    Returns:
        For each, by its path in `root` or that of the layer before it, what it took with it.
    """
    fused = {}
    for node in list(graph.nodes):
        act = module_of(node, root)
        if act is not None:
            curve = curve_of(act)
        else:
            one = node.op == "call_function" and len(node.args) == 1
            curve = curve_of_call(node.target, node.kwargs) if one else None
        if curve is None:
            continue
        if (linear := _linear_before(node, root)) is not None:
            with graph.inserting_before(linear):
                layer = graph.get_attr(str(linear.target))
                what = curve if act is None else graph.get_attr(str(node.target))
                both = graph.call_function(linear_act, (layer, what, linear.args[0]))
            _replace(graph, node, both)
            graph.erase_node(linear)
            place = (linear if act is None else node).target
            fused[str(place)] = f"with {curve}" if act is None else "with bias"
        elif act is not None and (product := _product_after(node, root)) is not None:
            (up,) = (arg for arg in product.args if arg is not node)
            with graph.inserting_before(product):
                module = graph.get_attr(str(node.target))
                both = graph.call_function(act_mul, (module, node.args[0], up))
            _replace(graph, product, both)
            graph.erase_node(node)
            fused[str(node.target)] = "with product"
    return fused


def _replace(graph: fx.Graph, node: fx.Node, other: fx.Node) -> None:
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def _linear_before(act: fx.Node, root: nn.Module) -> fx.Node | None:
    """The call of a linear layer with a bias whose result is for `act` alone."""
    (x,) = act.args
    if not isinstance(x, fx.Node) or list(x.users) != [act]:
        return None
    layer = module_of(x, root)
    has_bias = layer is not None and is_linear(layer) and layer.bias is not None
    return x if has_bias else None


def _product_after(act: fx.Node, root: nn.Module) -> fx.Node | None:
    """The product that the result of `act` is for alone, if `act` may be computed there."""
    users = list(act.users)
    if len(users) != 1 or called(users[0]) not in _PRODUCTS or users[0].kwargs:
        return None
    product = users[0]
    if len(product.args) != 2 or not all(isinstance(arg, fx.Node) for arg in product.args):
        return None
    node = act.next
    while node is not product:  # what it takes stays as it is
        module = module_of(node, root)
        if module is None or not is_reader(module):
            return None
        node = node.next
    return product if product.args[0] is not product.args[1] else None
