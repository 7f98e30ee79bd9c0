"""Norms and what is beside them, in the graph of a forward, as single calls.

A batch norm takes with it an add and a ReLU, if nobody else sees what is between them
(``norm_act``); a layer or RMS norm an add before it, whose sum others may see (``add_norm``).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampfuse.nn.fuse.trace import IN_PLACE
from ampfuse.nn.norm_act import is_known, norm_act
from ampfuse.nn.row_norm import add_norm, form_of

_ADDS = (operator.add, torch.add, "add")
_ADDS_IN_PLACE = (IN_PLACE["iadd"], "add_")
_RELUS = (F.relu, torch.relu, torch.relu_, "relu", "relu_")
# By their forwards: modules that read their input and return new memory.
_READERS = {
    cls.forward
    for cls in (
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, _BatchNorm, nn.SyncBatchNorm),
        *(nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
    )
}


def fuse_norms(graph: fx.Graph, root: nn.Module) -> dict[str, str]:
    """Rewrite the norms that `graph`, of a forward of `root`, calls: of layer and RMS norms those
    with an add.

    Returns:
        For each, by its path in `root`, what it took with it, in words.
    """
    fused = {}
    for node in list(graph.nodes):
        norm = module_of(node, root)
        if norm is not None and is_known(norm):
            fused[node.target] = _fuse_norm(graph, root, node)
        elif norm is not None and form_of(norm) and _fuse_add(graph, root, node):
            fused[node.target] = "with add"
    return fused


def _fuse_add(graph: fx.Graph, root: nn.Module, norm: fx.Node) -> bool:
    """Make one call of an add and of `norm`, which takes the sum; False where that is no add."""
    (add,) = norm.args
    if not (
        isinstance(add, fx.Node)
        and called(add) in _ADDS
        and not add.kwargs
        and len(add.args) == 2
        and all(isinstance(arg, fx.Node) for arg in add.args)
    ):
        return False
    # The norm moves up to the add.
    node = add.next
    while node is not norm:
        same = node.op == "call_module" and node.target == norm.target
        if same or (add in node.all_input_nodes and not reads(node, add, root)):
            return False
        node = node.next
    with graph.inserting_before(add):
        module = graph.get_attr(str(norm.target))
        both = graph.create_node("call_function", add_norm, (module, *add.args))
        y, total = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
    norm.replace_all_uses_with(y)
    graph.erase_node(norm)
    add.replace_all_uses_with(total)
    graph.erase_node(add)
    return True


def _fuse_norm(graph: fx.Graph, root: nn.Module, norm: fx.Node) -> str:
    (x,) = norm.args
    chain = [norm]
    between: list[Any] = []
    act: fx.Node | bool = False
    residual, in_place = None, False

    def follower() -> fx.Node | None:
        """The one node that sees the end of the chain, if it may be computed there."""
        users = list(chain[-1].users)
        return users[0] if len(users) == 1 and _may_move(chain, users[0], root) else None

    while (user := follower()) is not None and type(module_of(user, root)) is nn.Identity:
        chain.append(user)
        between.append(user.target)
    if user is not None and (other := _added_to(user, chain[-1])) is not None:
        residual, in_place = other, user.target in _ADDS_IN_PLACE
        chain.append(user)
        user = follower()
    if user is not None and user.args[:1] == (chain[-1],) and _is_relu(user, root):
        chain.append(user)
        act = True

    last = chain[-1]
    with graph.inserting_before(last):
        if act and last.op == "call_module":
            act = graph.get_attr(str(last.target))
        module, *between = (graph.get_attr(path) for path in (norm.target, *between))
        arguments = (module, x, residual, act, tuple(between), in_place)
        fused = graph.create_node("call_function", norm_act, arguments, {}, norm.name)
    last.replace_all_uses_with(fused)
    for node in reversed(chain):
        graph.erase_node(node)
    taken = [name for name, there in (("add", residual), ("ReLU", act)) if there]
    return "with " + " and ".join(taken) if taken else "alone"


def _may_move(chain: list[fx.Node], to: fx.Node, root: nn.Module) -> bool:
    """Whether the norm that starts `chain` finds the same where `to` is."""
    norm = chain[0]
    x: Any = norm.args[0]
    node = norm.next
    while node is not to:
        same = node.op == "call_module" and node.target == norm.target
        if node not in chain and (same or (x in node.all_input_nodes and not reads(node, x, root))):
            return False
        node = node.next
    return True


def _added_to(node: fx.Node, value: fx.Node) -> fx.Node | None:
    """What `node` adds to `value`; None if it does something else, or writes to the other."""
    if called(node) not in (*_ADDS, *_ADDS_IN_PLACE) or len(node.args) != 2 or node.kwargs:
        return None
    first, second = node.args
    if second is value and node.target in _ADDS:
        first, second = second, first
    if first is not value or second is value:
        return None
    return second if isinstance(second, fx.Node) else None


def called(node: fx.Node) -> Any:
    """The function that `node` calls, or the name of the method."""
    return node.target if node.op in ("call_function", "call_method") else None


def _is_relu(node: fx.Node, root: nn.Module) -> bool:
    return called(node) in _RELUS or type(module_of(node, root)) is nn.ReLU


def module_of(node: fx.Node, root: nn.Module) -> nn.Module | None:
    """The module that `node` calls with one argument; None if it does something else."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    return root.get_submodule(str(node.target))


def reads(node: fx.Node, value: fx.Node, root: nn.Module) -> bool:
    """Whether `node` is known to read `value`, and neither to write it nor to hand it on."""
    module = module_of(node, root)
    if module is not None:
        return is_reader(module)
    if node.target is norm_act:
        return value in node.args[1:3]
    written = node.args[:1] if called(node) in _ADDS_IN_PLACE else ()
    return called(node) in (*_ADDS, *_ADDS_IN_PLACE) and value not in written


def is_reader(module: nn.Module) -> bool:
    if type(module).forward is nn.Sequential.forward:
        return len(module._modules) > 0 and is_reader(next(module.children()))
    return type(module).forward in _READERS
