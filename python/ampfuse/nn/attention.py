"""Queries, keys and values as views of one projection, whose gradient is written once."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from ampfuse.nn.patterns import called
from ampfuse.nn.tracing import IN_PLACE


def split_qkv(packed: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values for ``F.scaled_dot_product_attention``, as views of `packed`.

    The backward pass copies each of the three gradients once, to its place in the gradient of
    `packed`. With ``reshape(...).permute(2, 0, 3, 1, 4).unbind(0)`` it stacks them and then copies
    the stack, as the permutation comes between.

    Arguments:
        packed: shape (..., tokens, 3 * heads * width): the queries of all heads, then the keys,
            then the values, of any dtype.

    Returns:
        Three tensors of shape (..., heads, tokens, width).

    Raises:
        ValueError: the last dimension of `packed` is not a multiple of ``3 * heads``.

    Source: the packed projections of GPT-2 (Radford et al. 2019) and of timm's ``Attention``.
    """
    if packed.dim() < 2 or packed.shape[-1] % (3 * heads):
        raise ValueError(
            f"packed must have shape (..., tokens, {3 * heads} * width), got {tuple(packed.shape)}."
        )
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(-3, -2) for part in packed.chunk(3, -1))
    return q, k, v


def fuse_splits(graph: fx.Graph, root: nn.Module) -> dict[str, str]:
    """Have ``x.permute(dims).unbind(0)`` take `x` apart before it permutes the parts.

    The same for ``x.permute(dims)[i]``, which autograd would give a gradient of zeros for each i.

    Returns:
        For each, by the path in `root` of the layer that made `x`, what it took with it.
    """
    fused = {}
    for node in list(graph.nodes):
        dims, parts = _permutation(node), _parts(node)
        if not dims or dims[0] == 0 or not parts:
            continue
        first, *rest = dims
        with graph.inserting_before(node):
            unbound = graph.call_method("unbind", (node.args[0], first))
        for part in parts:
            with graph.inserting_before(part):
                item = graph.call_function(operator.getitem, (unbound, part.args[1]))
                view = graph.call_method("permute", (item, *(d - (d > first) for d in rest)))
            part.replace_all_uses_with(view)
            graph.erase_node(part)
        fused[_layer_before(node)] = "with split"
        for user in (*node.users, node):
            graph.erase_node(user)
    return fused


def _permutation(node: fx.Node) -> list[int] | None:
    """The dimensions of ``permute``; None where `node` is something else."""
    if called(node) not in ("permute", torch.permute) or node.kwargs:
        return None
    dims: Any = node.args[1:]
    if len(dims) == 1 and isinstance(dims[0], tuple | list):
        dims = tuple(dims[0])
    return [d % len(dims) for d in dims] if all(isinstance(d, int) for d in dims) else None


def _parts(node: fx.Node) -> list[fx.Node]:
    """The uses of ``node[i]`` or ``node.unbind(0)[i]``, if there are only such."""
    users = list(node.users)
    if len(users) == 1 and called(users[0]) in ("unbind", torch.unbind):
        (unbound,) = users
        if unbound.args[1:] not in ((), (0,)) or unbound.kwargs not in ({}, {"dim": 0}):
            return []
        users = list(unbound.users)
    elif any(map(_writes, node.graph.nodes)):  # unbind's views refuse it
        return []
    simple = (u.target is operator.getitem and isinstance(u.args[1], int) for u in users)
    return users if all(simple) else []


def _writes(node: fx.Node) -> bool:
    name = str(called(node))
    in_place = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
    return in_place or node.target in (operator.setitem, *IN_PLACE.values())


def _layer_before(node: fx.Node) -> str:
    while called(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return str(node.target) if node.op == "call_module" else ""
