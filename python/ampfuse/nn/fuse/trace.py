"""The ``forward`` of a module as a graph in which its children are single steps.

A forward that a graph cannot represent is refused, with the reason: one that branches on values,
keeps something between calls, draws random numbers, or changes the gradient mode.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import functools
import operator
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import inplace_methods
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode


class Untraceable(Exception):
    """A forward that cannot be traced; the message says why."""


class GraphKey(NamedTuple):
    """The properties of a call of ``forward`` that decide which graph it runs.

    Attributes:
        training: the mode.
        arguments: the name of each argument and its type, see :func:`argument_type`. An argument
            that has its default is left out.
    """

    training: bool
    arguments: tuple[tuple[str, Any], ...]


# The types of arguments that have graphs of their own in a forward that checks types.
ARGUMENT_TYPES = (Tensor, list, tuple)
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, enum.Enum)


def argument_type(argument: Any) -> Any:
    """The type of `argument`, or the one of ARGUMENT_TYPES that it is an instance of; for a
    constant, which becomes part of a graph, type and value."""
    for kind in ARGUMENT_TYPES:
        if isinstance(argument, kind):
            return kind
    return (type(argument), argument) if isinstance(argument, _CONSTANTS) else type(argument)


def is_graph_input(kind: Any) -> bool:
    """Whether an argument of this type is an input of a graph; a constant is part of it."""
    return isinstance(kind, type)


def trace(module: nn.Module, cls: type[nn.Module], key: GraphKey) -> tuple[fx.Graph, bool]:
    """The graph of ``cls.forward`` on `module`; its inputs are the arguments but for constants.

    Arguments:
        key: the mode of `module` and everything in it, and the types that ``isinstance`` finds for
            the arguments.

    Returns:
        The graph, and whether ``forward`` checks the type of an argument that is an input.

    Raises:
        Untraceable: a graph cannot represent it; the message says why.
    """
    # An instance of the class whose forward it is, with the attributes of `module`.
    stand_in: nn.Module = object.__new__(cls)
    stand_in.__dict__ = module.__dict__
    tracer, drawn = _Tracer(key), random.getstate()
    with (
        _mode(module, key.training),
        _unchanged(module),
        _isinstance_of_values(),
        _OnlyOfArguments(),
    ):
        try:
            graph = tracer.trace(stand_in)
        except Exception as error:  # whatever this forward does with a proxy
            reason = str(error).strip().split("\n")[0]
            raise Untraceable(f"{cls.__name__}.forward cannot be traced: {reason}") from error
    if random.getstate() != drawn:
        random.setstate(drawn)
        raise Untraceable(f"{cls.__name__}.forward draws random numbers")
    for node in graph.nodes:
        node.meta.clear()  # else torch.cat would be wrapped in every trace from then on
    return graph, tracer.checks_types


# C++ parses their numbers and lists of tensors before it asks a proxy that stands for one.
_WRAPPED = (
    *(torch.cat, torch.stack, torch.arange, torch.linspace),
    *(torch.empty, torch.zeros, torch.ones, torch.full),
)

# A graph has these, and named tuples; fx would make the others a list, a tuple or a dict.
_COLLECTIONS = (list, tuple, dict, torch.Size, immutable_list, immutable_dict)


class _Tracer(fx.Tracer):
    def __init__(self, key: GraphKey) -> None:
        super().__init__(autowrap_functions=_WRAPPED)
        self._autowrap_search.append(torch)
        self._arguments = dict(key.arguments)
        self._context = _context()
        self._given: list[Any] = []  # lists and dicts that modules have got
        self.checks_types = False

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_args_for_root(self, root_fn: Any, *_: Any) -> tuple[Any, list[Any]]:
        inputs = {
            name: self.create_proxy("placeholder", name, (), {})
            if is_graph_input(kind)
            else kind[1]
            for name, kind in self._arguments.items()
        }
        return functools.partial(root_fn, self.root, **inputs), []

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if _context() != self._context:
            raise Untraceable("it changes the gradient mode or autocast")
        return super().create_node(kind, *args, **kwargs)

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = super().call_module(m, forward, args, kwargs)
        for each in (*args, *kwargs.values()):
            if type(each) in (list, dict):
                if not each:
                    raise Untraceable("it gives a module an empty collection, to be filled")
                self._given.append(each)
        return result

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def type_of(self, node: fx.Node) -> type:
        """The type that ``isinstance`` finds for the value of `node`, if that is an argument."""
        if node.op != "placeholder":
            raise Untraceable("it checks the type of a value that it computes")
        self.checks_types = True
        return self._arguments[str(node.target)]

    def create_arg(self, a: Any) -> Any:
        kind = type(a)
        if issubclass(kind, fx.Proxy):  # before anything checks its type
            return a.node
        if any(a is given for given in self._given):  # and may have changed
            raise Untraceable("it uses a collection again that it gave to a module")
        if kind is OrderedDict:
            return self.create_proxy("call_function", OrderedDict, ([*a.items()],), {}).node
        is_collection = issubclass(kind, (list, tuple, dict)) and not hasattr(kind, "_fields")
        if is_collection and kind not in _COLLECTIONS:
            raise Untraceable(f"it makes a {kind.__name__}")
        for literal in (float, complex, str):  # code has no other ones, as NumPy's float64 is
            if issubclass(kind, literal) and not issubclass(kind, enum.Enum):
                a = literal(a)
        return super().create_arg(a)


def _context() -> tuple[Any, ...]:
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *(torch.is_autocast_enabled(device) for device in devices),
        *(torch.get_autocast_dtype(device) for device in devices),
    )


class _Proxy(fx.Proxy):
    """A proxy whose ``x += y`` stays in place (fx would make it ``x = x + y``), and whose tracer
    answers ``isinstance``."""

    tracer: _Tracer

    # C++ asks for it, too, and would read the memory of a proxy that passes for a tensor.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise Untraceable("it reads the type of a value, or passes one to a function as a number")


@contextlib.contextmanager
def _isinstance_of_values() -> Iterator[None]:
    """In the block, ``isinstance`` finds the types of the values that proxies stand for."""
    before = builtins.isinstance

    def of_value(value: Any, kind: Any) -> bool:
        if type(value) is not _Proxy:
            return before(value, kind)
        return issubclass(_Proxy, kind) or issubclass(value.tracer.type_of(value.node), kind)

    builtins.isinstance = of_value
    try:
        yield
    finally:
        builtins.isinstance = before


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    apply = getattr(operator, name)

    # fx writes operator's own as statements, which rebind names.
    def statement(x: Any, y: Any) -> Any:
        return apply(x, y)

    statement.__name__ = statement.__qualname__ = name
    return statement


IN_PLACE = {name: _in_place(name) for name in inplace_methods if name != "setitem"}


def _recorded(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: self.tracer.create_proxy(
        "call_function", function, (self, other), {}
    )


for _name, _function in IN_PLACE.items():
    setattr(_Proxy, f"__{_name}__", _recorded(_function))


class _OnlyOfArguments(TorchFunctionMode):
    """Refuses operations on no argument: their result would become a constant of the graph."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not any(issubclass(t, fx.Proxy) for t in types):
            name = getattr(func, "__name__", func)
            raise Untraceable(f"it computes {name} from none of its arguments")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _mode(module: nn.Module, training: bool) -> Iterator[None]:
    before = [(m, m.training) for m in module.modules()]
    for each, _ in before:
        each.training = training
    try:
        yield
    finally:
        for each, was in before:
            each.training = was


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of `module`; raise Untraceable if the block has set any."""
    dicts: tuple[dict[str, Any], ...] = (
        module.__dict__,
        module._parameters,
        module._buffers,
        module._modules,
    )
    before = [dict(each) for each in dicts]
    try:
        yield
    finally:
        changed = {
            key
            for now, then in zip(dicts, before, strict=True)
            for key in now.keys() | then.keys()
            if now.get(key) is not then.get(key)
        }
        for now, then in zip(dicts, before, strict=True):
            now.clear()
            now.update(then)
    if changed:
        raise Untraceable(f"{type(module).__name__}.forward sets self.{min(changed)}")


# ---- reading and changing a graph ----------------------------------------------------------------

# By their forwards: modules that read their input and return new memory.
_READERS = {
    cls.forward
    for cls in (
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, _BatchNorm, nn.SyncBatchNorm),
        *(nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
    )
}


def called(node: fx.Node) -> Any:
    """The function that `node` calls, or the name of the method."""
    return node.target if node.op in ("call_function", "call_method") else None


def is_reader(module: nn.Module) -> bool:
    """Whether `module` is known to leave its input as it is, and to return new memory."""
    if type(module).forward is nn.Sequential.forward:
        return len(module._modules) > 0 and is_reader(next(module.children()))
    return type(module).forward in _READERS


def between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """The nodes of a graph after `first` and before `last`."""
    while (first := first.next) is not last:
        yield first


def replace(node: fx.Node, other: fx.Node) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)
