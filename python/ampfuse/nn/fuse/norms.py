"""Norms: their fused forms, and how a graph gets them.

A batch norm takes with it an add and a ReLU, if nothing else reads the values between them
(``norm_act``). A layer or RMS norm takes the add before it, whose sum others may read
(``add_norm``), or runs alone (``alone``).
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ampfuse.nn.functional import normalize_rows, same_shape_and_dtype
from ampfuse.nn.fuse.forwards import class_of, forward_name, module_of
from ampfuse.nn.fuse.trace import IN_PLACE, between, called, is_reader, replace
from ampfuse.nn.modules import normalize

# ---- batch norms ---------------------------------------------------------------------------------


def is_batch_norm2d(norm: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether `norm` is one of images that computes what torch's does."""
    return isinstance(norm, nn.BatchNorm2d) and type(norm).forward is _BatchNorm.forward


def norm_act(
    norm: _BatchNorm, x: Tensor, residual: Any, relu: bool, in_place: bool = False
) -> Tensor:
    """``relu(norm(x) + residual)``, without a `residual` of None, and without `relu`.

    Arguments:
        in_place: the residual is added in place, which decides the type of the sum.
    """
    if residual is None or same_shape_and_dtype(residual, x):
        return normalize(norm, x, residual, relu)
    out = norm(x)
    out = operator.iadd(out, residual) if in_place else out + residual
    return F.relu(out) if relu else out


# ---- layer and RMS norms -------------------------------------------------------------------------


class NormSpec(NamedTuple):
    """The layer or RMS norm that the ``forward`` of a class computes."""

    centered: bool = True
    eps: str = "eps"
    images: bool = False  # (N, C, H, W), over the channels
    promotes: bool = False  # to the dtype of the weight, if it differs from the input's


# By the name of the ``forward``.
_SPECS = {
    "torch.nn.modules.normalization.LayerNorm.forward": NormSpec(),
    "torch.nn.modules.normalization.RMSNorm.forward": NormSpec(centered=False),
    "timm.layers.norm.LayerNorm.forward": NormSpec(),
    "timm.layers.norm.LayerNorm2d.forward": NormSpec(images=True),
    "timm.layers.norm.RmsNorm.forward": NormSpec(centered=False),
    "torchvision.models.convnext.LayerNorm2d.forward": NormSpec(images=True),
}
# Models of transformers compute this with classes of their own.
_LLAMA = NormSpec(centered=False, eps="variance_epsilon", promotes=True)
_LIKE_LLAMA: dict[type[nn.Module], bool] = {}
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}


def norm_spec(norm: nn.Module) -> NormSpec | None:
    """The specification of `norm`; None if it has no fused form."""
    cls = class_of(norm)
    if hasattr(norm, _LLAMA.eps):
        if not _has_weight_and_eps_alone(norm):
            return None
        if cls not in _LIKE_LLAMA:
            _LIKE_LLAMA[cls] = _computes_rms_norm(norm)
        return _LLAMA if _LIKE_LLAMA[cls] else None
    return _SPECS.get(forward_name(norm))


def _has_weight_and_eps_alone(norm: Any) -> bool:
    public = {name for name in vars(norm) if name[0] != "_"} - {_LLAMA.eps, "training", "forward"}
    parts = [*norm.named_parameters(), *norm.named_buffers(), *norm.named_children()]
    return not public and [name for name, _ in parts] == ["weight"]


def _computes_rms_norm(norm: Any) -> bool:
    """Whether ``forward`` of its class computes the RMS norm of one argument, by trying it.

    The name does not show whether the weight is added to 1, or whether there is a gate.
    """
    cls, eps = class_of(norm), getattr(norm, _LLAMA.eps)
    try:
        if len(inspect.signature(cls.forward).parameters) != 2:
            return False
        for training, (dtype, tolerance) in itertools.product((True, False), _TOLERANCES.items()):
            generator = torch.Generator().manual_seed(0)
            weight, x = torch.randn(2, *norm.weight.shape, generator=generator, device="cpu")
            # Rows of a mean that is not 0, and of sizes at which eps matters and does not.
            x = (x + 1) * x.new_tensor([[0.1], [1.0], [1e3]]) * eps**0.5
            x, weight = x.to(dtype), nn.Parameter(weight.to(dtype), requires_grad=False)
            stand_in: Any = object.__new__(cls)
            stand_in.__dict__ = vars(norm) | {"_parameters": {"weight": weight}}
            stand_in.__dict__["training"] = training
            exact = x.double()
            exact = exact * (exact.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
            y = cls.forward(stand_in, x)
            if y.dtype != dtype or not torch.allclose(y.double(), exact, tolerance, 0.0):
                return False
    except Exception:  # whatever this forward does with three rows
        return False
    return True


def add_norm(norm: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """``(norm(x + residual), x + residual)``, fused if possible."""
    if same_shape_and_dtype(x, residual) and (results := _normalize(norm, x, residual)):
        return results[0], results[1]
    total = x + residual
    return norm(total), total


def alone(norm: nn.Module, x: Tensor) -> Tensor | None:
    """``norm(x)`` of a layer or RMS norm, fused; None if that is not possible."""
    results = _normalize(norm, x)
    return results[0] if results else None


def _normalize(norm: Any, x: Tensor, residual: Tensor | None = None) -> list[Tensor] | None:
    """The norm, and with a residual the sum; None if they are not fused."""
    spec = norm_spec(norm)
    if spec is None or torch.compiler.is_compiling():  # a compiler fuses it with more than we do
        return None
    if spec.promotes and norm.weight.dtype != x.dtype:
        return None
    if spec.images:
        x = x.permute(0, 2, 3, 1)
        residual = None if residual is None else residual.permute(0, 2, 3, 1)
    shape = getattr(norm, "normalized_shape", None) or norm.weight.shape
    bias, eps = norm.bias if spec.centered else None, getattr(norm, spec.eps)
    results = normalize_rows(x, residual, shape, norm.weight, bias, eps, centered=spec.centered)
    return [y.permute(0, 3, 1, 2) for y in results] if spec.images else results


# ---- in a graph ----------------------------------------------------------------------------------

_ADDS = (operator.add, torch.add, "add")
_ADDS_IN_PLACE = (IN_PLACE["iadd"], "add_")
_RELUS = (F.relu, torch.relu, torch.relu_, "relu", "relu_")


def rewrite(graph: fx.Graph, root: nn.Module) -> dict[str, str]:
    """Fuse the norms that `graph`, of a forward of `root`, calls: batch norms, and layer and RMS
    norms after an add.

    Returns:
        For each, by its path in `root`, what it was fused with.
    """
    fused = {}
    for node in list(graph.nodes):
        norm = module_of(node, root)
        if norm is not None and is_batch_norm2d(norm):
            fused[str(node.target)] = _fuse_batch_norm(graph, root, node)
        elif norm is not None and norm_spec(norm) and _fuse_add(graph, root, node):
            fused[str(node.target)] = "with add"
    return fused


def _fuse_add(graph: fx.Graph, root: nn.Module, norm: fx.Node) -> bool:
    """Make one call of an add and of `norm`, which takes the sum; False if there is no such add."""
    (add,) = norm.args
    if not (
        isinstance(add, fx.Node)
        and called(add) in _ADDS
        and not add.kwargs
        and len(add.args) == 2
        and all(isinstance(arg, fx.Node) for arg in add.args)
        and _commutes(norm, add, between(add, norm), root)  # the norm moves up to the add
    ):
        return False
    with graph.inserting_before(add):
        module = graph.get_attr(str(norm.target))
        both = graph.create_node("call_function", add_norm, (module, *add.args))
        y, total = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
    replace(norm, y)
    replace(add, total)
    return True


def _fuse_batch_norm(graph: fx.Graph, root: nn.Module, norm: fx.Node) -> str:
    """Make one call of `norm` and what may follow it: identities, an add, a ReLU."""
    (x,) = norm.args
    chain = [norm]
    residual, in_place, relu = None, False, False

    def follower() -> fx.Node | None:
        """The node that alone reads the end of the chain, if the norm may be computed there."""
        users = list(chain[-1].users)
        if len(users) != 1:
            return None
        others = (node for node in between(norm, users[0]) if node not in chain)
        return users[0] if _commutes(norm, x, others, root) else None

    while (user := follower()) is not None and type(module_of(user, root)) is nn.Identity:
        chain.append(user)
    if user is not None and (other := _added_to(user, chain[-1])) is not None:
        residual, in_place = other, user.target in _ADDS_IN_PLACE
        chain.append(user)
        user = follower()
    if user is not None and user.args[:1] == (chain[-1],) and _is_relu(user, root):
        chain.append(user)
        relu = True

    last = chain[-1]
    with graph.inserting_before(last):
        arguments = (graph.get_attr(str(norm.target)), x, residual, relu, in_place)
        fused = graph.create_node("call_function", norm_act, arguments, {}, norm.name)
    last.replace_all_uses_with(fused)
    for node in reversed(chain):
        graph.erase_node(node)
    taken = [name for name, there in (("add", residual), ("ReLU", relu)) if there]
    return "with " + " and ".join(taken) if taken else "alone"


def _commutes(norm: fx.Node, x: Any, nodes: Iterable[fx.Node], root: nn.Module) -> bool:
    """Whether `norm` of `x` is the same before and after `nodes`."""
    return not any(
        (node.op == "call_module" and node.target == norm.target)
        or (x in node.all_input_nodes and not _only_reads(node, x, root))
        for node in nodes
    )


def _only_reads(node: fx.Node, value: fx.Node, root: nn.Module) -> bool:
    """Whether `node` is known neither to write to `value` nor to return it or a view of it."""
    module = module_of(node, root)
    if module is not None:
        return is_reader(module)
    if node.target is norm_act:
        return value in node.args[1:3]
    written = node.args[:1] if called(node) in _ADDS_IN_PLACE else ()
    return called(node) in (*_ADDS, *_ADDS_IN_PLACE) and value not in written


def _added_to(node: fx.Node, value: fx.Node) -> fx.Node | None:
    """The other operand, if `node` adds it to `value` and does not write to it; else None."""
    if called(node) not in (*_ADDS, *_ADDS_IN_PLACE) or len(node.args) != 2 or node.kwargs:
        return None
    first, second = node.args
    if second is value and node.target in _ADDS:
        first, second = second, first
    if first is not value or second is value:
        return None
    return second if isinstance(second, fx.Node) else None


def _is_relu(node: fx.Node, root: nn.Module) -> bool:
    return called(node) in _RELUS or type(module_of(node, root)) is nn.ReLU
