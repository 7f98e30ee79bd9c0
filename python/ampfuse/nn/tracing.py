"""A module's own ``forward`` as a graph in which its children are single steps.

What a graph cannot say is refused, with the reason, and never guessed: a forward that branches on
values, keeps something between calls, draws random numbers, or changes the gradient mode.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import inplace_methods
from torch.overrides import TorchFunctionMode


class Untraceable(Exception):
    """A forward that cannot be traced; the message says why."""


class Call(NamedTuple):
    """What a graph depends on in a call of a forward.

    Attributes:
        training: the mode.
        arguments: the name of each argument and its kind, see :func:`kind_of`. An argument that
            has its default is left out.
    """

    training: bool
    arguments: tuple[tuple[str, Any], ...]


KINDS = (Tensor, list, tuple)
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, enum.Enum)


def kind_of(argument: Any) -> Any:
    """The type that a forward may ask for, one of KINDS if it is one; of a constant that and the
    value, as a pair."""
    for kind in KINDS:
        if isinstance(argument, kind):
            return kind
    return (type(argument), argument) if is_constant(argument) else type(argument)


def is_constant(value: Any) -> bool:
    """Whether a graph would hold `value` as it is."""
    return isinstance(value, _CONSTANTS)


def is_taken(kind: Any) -> bool:
    """Whether a graph takes an argument of this kind, and does not hold it."""
    return isinstance(kind, type)


def trace(module: nn.Module, cls: type[nn.Module], call: Call, values: type) -> fx.Graph:
    """The graph of ``cls.forward`` on `module`; it takes what is no constant in `call`.

    Arguments:
        call: its mode is that of `module` and all in it, its types are what the arguments of
            forward say that they are.
        values: what everything that is computed says that it is.

    Raises:
        Untraceable: see the module.
    """
    # Of the class whose forward it is, with the attributes of `module`.
    stand_in: nn.Module = object.__new__(cls)
    stand_in.__dict__ = module.__dict__
    drawn = random.getstate()
    with _mode(module, call.training), _unchanged(module), _OnlyOfArguments():
        try:
            graph = _Tracer(call, values).trace(stand_in)
        except Exception as error:  # whatever its lines make of a proxy
            reason = str(error).strip().split("\n")[0]
            raise Untraceable(f"{cls.__name__}.forward cannot be traced: {reason}") from error
    if random.getstate() != drawn:
        random.setstate(drawn)
        raise Untraceable(f"{cls.__name__}.forward draws random numbers")
    for node in graph.nodes:
        node.meta.clear()  # would have the source wrap torch.cat in every trace from then on
    return graph


class _Tracer(fx.Tracer):
    def __init__(self, call: Call, values: type) -> None:
        # C++ parses a list of tensors before it asks a proxy that stands for one.
        super().__init__(autowrap_functions=(torch.cat, torch.stack))
        self._autowrap_search.append(torch)
        self._arguments, self._values = dict(call.arguments), values
        self._context = _context()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_args_for_root(self, root_fn: Any, *_: Any) -> tuple[Any, list[Any]]:
        inputs = {
            name: self.create_proxy("placeholder", name, (), {}) if is_taken(kind) else kind[1]
            for name, kind in self._arguments.items()
        }
        return functools.partial(root_fn, self.root, **inputs), []

    def create_node(self, kind: str, *args: Any, **kwargs: Any) -> fx.Node:
        if _context() != self._context:
            raise Untraceable("it changes the gradient mode or autocast")
        return super().create_node(kind, *args, **kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        said = self._arguments[str(node.target)] if node.op == "placeholder" else self._values
        return _saying(said)(node, self)

    def create_arg(self, a: Any) -> Any:
        # Before anybody asks for its type.
        return a.node if issubclass(type(a), fx.Proxy) else super().create_arg(a)


def _context() -> tuple[Any, ...]:
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *(torch.is_autocast_enabled(device) for device in devices),
        *(torch.get_autocast_dtype(device) for device in devices),
    )


class _Proxy(fx.Proxy):
    """One whose ``x += y`` stays in place; fx would make it ``x = x + y``."""


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    apply = getattr(operator, name)

    # fx writes operator's own as statements, which rebind names.
    def statement(x: Any, y: Any) -> Any:
        return apply(x, y)

    statement.__name__ = statement.__qualname__ = name
    return statement


IN_PLACE = {name: _in_place(name) for name in inplace_methods if name != "setitem"}


def _recorded(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(self: fx.Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


for _name, _function in IN_PLACE.items():
    setattr(_Proxy, f"__{_name}__", _recorded(_function))


@functools.cache
def _saying(said: type) -> type[_Proxy]:
    """Proxies that ``isinstance`` takes for a `said`."""
    return type(f"_{said.__name__}Proxy", (_Proxy,), {"__class__": property(lambda _: said)})


class _OnlyOfArguments(TorchFunctionMode):
    """Refuses what is computed from no argument: it would be computed once and for all."""

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
    """Raise Untraceable if the block sets attributes of `module`; they get back their values."""
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
