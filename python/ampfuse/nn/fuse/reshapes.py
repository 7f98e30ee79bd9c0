"""Layers whose data is moved the other way round: packed projections and patch embeddings."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from ampfuse.nn.functional import has_patches, patch_conv2d
from ampfuse.nn.fuse.forwards import class_of
from ampfuse.nn.fuse.trace import IN_PLACE, called, replace
from ampfuse.torch_utils import HALF_DTYPES

# ---- packed projections of queries, keys and values ----------------------------------------------


def split_projections(graph: fx.Graph, root: nn.Module) -> dict[str, str]:
    """Have ``x.permute(dims).unbind(0)`` take `x` apart before it permutes the parts.

    Then autograd writes the gradient of the projection once (see :func:`ampfuse.nn.split_qkv`).
    The same for ``x.permute(dims)[i]``, where autograd would make a gradient of zeros for each i.

    Returns:
        For each split, by the path in `root` of the layer that made `x`, what was fused.
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
            replace(part, view)
        fused[_layer_before(node)] = "with split"
        for user in (*node.users, node):
            graph.erase_node(user)
    return fused


def _permutation(node: fx.Node) -> list[int] | None:
    """The dimensions of ``permute``; None if `node` is another operation."""
    if called(node) not in ("permute", torch.permute) or node.kwargs:
        return None
    dims: Any = node.args[1:]
    if len(dims) == 1 and isinstance(dims[0], tuple | list):
        dims = tuple(dims[0])
    return [d % len(dims) for d in dims] if all(isinstance(d, int) for d in dims) else None


def _parts(node: fx.Node) -> list[fx.Node]:
    """The uses of ``node[i]`` or ``node.unbind(0)[i]``; none if `node` has other uses."""
    users = list(node.users)
    if len(users) == 1 and called(users[0]) in ("unbind", torch.unbind):
        (unbound,) = users
        if unbound.args[1:] not in ((), (0,)) or unbound.kwargs not in ({}, {"dim": 0}):
            return []
        users = list(unbound.users)
    elif any(map(_writes, node.graph.nodes)):  # views of unbind cannot be written to
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


# ---- patch embeddings: a convolution whose stride is its kernel, as a matrix product -------------

_MIN_PIXELS = 8  # for smaller patches the copy costs more than the convolution


def takes_patches(module: Any) -> bool:
    """Whether `module` is a convolution of such patches, of at least 8 pixels each way."""
    return (
        isinstance(module, nn.Conv2d)
        and class_of(module).forward is nn.Conv2d.forward
        and type(module)._conv_forward is nn.Conv2d._conv_forward
        and module.kernel_size == module.stride
        and min(module.kernel_size) >= _MIN_PIXELS
        and module.padding in ((0, 0), "valid")
        and module.dilation == (1, 1)
        and module.groups == 1
    )


def patches_alone(conv: Any, x: Tensor) -> Tensor | None:
    """``conv(x)`` as a product; None if that is not possible, or no faster."""
    is_faster = not x.is_cpu or x.dtype in HALF_DTYPES  # on CPUs a convolution in FP32 is as fast
    if not is_faster or not takes_patches(conv) or not has_patches(x, conv.weight):
        return None
    return patch_conv2d(x, conv.weight, conv.bias)
