"""The ``forward`` of a module instance: its replacement, and one that runs graphs."""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import types
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn.modules.module import _has_any_global_hook

from ampfuse.nn.fuse.trace import (
    ARGUMENT_TYPES,
    GraphKey,
    Untraceable,
    argument_type,
    is_graph_input,
    trace,
)
from ampfuse.torch_utils import WrappedForward, original_class

Rewrite = Callable[[fx.Graph, nn.Module], dict[str, str]]


def class_of(module: nn.Module) -> Any:
    """The class of `module`; under amp's casts, the class whose ``forward`` they are around."""
    return original_class(type(module)) if isinstance(module, WrappedForward) else type(module)


def forward_name(module: nn.Module) -> str:
    """The name of the ``forward`` of its class, with the Python module that defines it."""
    forward = class_of(module).forward
    return f"{forward.__module__}.{forward.__qualname__}"


def names_in(module: nn.Module) -> set[str]:
    """The functions, methods and attributes that the ``forward`` of its class names."""
    code = getattr(inspect.unwrap(class_of(module).forward), "__code__", None)
    return set() if code is None else set(code.co_names)


def runs_plainly(module: Any) -> bool:
    """Whether calling it is calling its class's ``forward``, or a fused one, without hooks or
    casts."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or isinstance(module, WrappedForward)
        or ("forward" in module.__dict__ and has_custom_forward(module))
    )


def module_of(node: fx.Node, root: nn.Module) -> nn.Module | None:
    """The module that `node` calls with one argument, and that runs plainly; None if there is
    none."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return None
    module = root.get_submodule(str(node.target))
    return module if runs_plainly(module) else None


# ---- fused forwards on instances -----------------------------------------------------------------


def override_of(module: nn.Module) -> str:
    """The attribute of `module` that overrides the ``forward`` of its class."""
    return "_amp_inner_forward" if isinstance(module, WrappedForward) else "forward"


def has_custom_forward(module: nn.Module) -> bool:
    """Whether `module` has a ``forward`` that is neither its class's nor a fused one."""
    present = module.__dict__.get(override_of(module))
    # A bound method that was pickled is the one of the class now.
    is_of_class = getattr(present, "__func__", None) is class_of(module).forward
    return not (present is None or is_of_class or is_fused(present))


def check_free(module: nn.Module) -> None:
    """Raise Untraceable if `module` has another ``forward`` than its class's."""
    if is_fused(module.__dict__.get(override_of(module))):
        raise Untraceable("already fused")
    if has_custom_forward(module):
        raise Untraceable(f"this {class_of(module).__name__} has a custom forward")


def set_fused(module: nn.Module, forward: Any) -> None:
    """Make `module` run the function `forward` instead of its class's.

    Raises Untraceable if it has another already.
    """
    check_free(module)
    functools.update_wrapper(forward, class_of(module).forward)
    forward.is_fused = True
    forward.__name__ = "forward"  # a bound method pickles as the name of its function
    forward.__code__ = forward.__code__.replace()  # torch.compile counts compilations by it
    module.__dict__[override_of(module)] = types.MethodType(forward, module)


def fuse_alone(module: nn.Module, compute: Callable[[Any, Any], Any]) -> None:
    """Make `module` run `compute` of itself and its input.

    It runs its class's ``forward`` where `compute` returns None, and for other arguments.
    Raises Untraceable if it has another ``forward`` than its class's.
    """
    original = class_of(module).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        y = compute(self, args[0]) if len(args) == 1 and not kwargs else None
        return original(self, *args, **kwargs) if y is None else y

    set_fused(module, forward)


def is_fused(method: Any) -> bool:
    """Whether this is a ``forward`` that fusing put on an instance."""
    return hasattr(getattr(method, "__func__", None), "is_fused")


# ---- one that runs graphs ------------------------------------------------------------------------

_MAX_GRAPHS = 24  # of one module
_OF_ALL_MODULES = frozenset(dir(nn.Module()))
_number = itertools.count()


def fuse_graphs(owner: nn.Module, rewrites: Iterable[Rewrite]) -> dict[nn.Module, str]:
    """Make `owner` run its graphs, changed by `rewrites`, if something is fused in them.

    Graphs of calls without optional arguments are made here, one for each mode, unless ``forward``
    checks the types of its arguments: then one for each type, too. Graphs of other calls are made
    at the first such call, except under a compiler.

    Returns:
        With what each module is fused.

    Raises:
        Untraceable: no graph can be made, or `owner` has another ``forward`` than its class's.
    """
    check_free(owner)
    cls = class_of(owner)
    _, *parameters = inspect.signature(cls.forward).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p for p in parameters if p.name in names or p.kind == p.KEYWORD_ONLY]
    defaults = {p.name: p.default for p in named if p.default is not p.empty}
    required = [p.name for p in named if p.default is p.empty]
    settings = _settings(owner)
    variants: dict[GraphKey, _Variant | None] = {}
    fused: dict[nn.Module, str] = {}
    failure: Untraceable | None = None
    for training in (True, False):
        variant: _Variant | None = None
        checks_types = True
        for kind in ARGUMENT_TYPES:
            key = GraphKey(training, tuple((name, kind) for name in required))
            if checks_types:
                try:
                    variant, now, checks_types = _variant(owner, cls, key, rewrites)
                    fused = now | fused
                except Untraceable as error:
                    variant, failure = None, failure or error
            variants[key] = variant
    if not any(variants.values()):
        assert failure is not None
        raise failure

    original: Any = cls.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        unchanged = all(argument_type(getattr(self, name, None)) == kind for name, kind in settings)
        if not unchanged or len(given) != len(args) + len(kwargs):
            return original(self, *args, **kwargs)
        given = {k: v for k, v in given.items() if k not in defaults or v is not defaults[k]}
        key = GraphKey(self.training, tuple((k, argument_type(v)) for k, v in given.items()))
        full = len(variants) >= _MAX_GRAPHS
        if key not in variants and not full and not torch.compiler.is_compiling():
            try:
                variants[key], *_ = _variant(self, cls, key, rewrites)
            except Untraceable:
                variants[key] = None
        variant = variants.get(key)
        if variant is None or not variant.fits(self):
            return original(self, *args, **kwargs)
        inputs = (given[name] for name, kind in key.arguments if is_graph_input(kind))
        return variant.run(self, *inputs)

    if fused:
        set_fused(owner, forward)
    return fused


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    """The constant attributes of `module` and its class, on which a graph may depend: names, and
    types with values."""
    names = [name for name in dir(module) if name[0] != "_" and name not in _OF_ALL_MODULES]
    kinds = [argument_type(inspect.getattr_static(module, name, ...)) for name in names]
    return [pair for pair in zip(names, kinds, strict=True) if not is_graph_input(pair[1])]


class _Variant(NamedTuple):
    """A changed graph as the method `run`.

    `taken` has the modules that it does not call as such any more: where they are, and their types.
    """

    run: Callable[..., Any]
    taken: list[tuple[list[str], type]]

    def fits(self, owner: nn.Module) -> bool:
        """Whether the modules in `taken` still have their types, and none has got hooks."""
        for path, cls in self.taken:
            module: Any = owner
            for name in path:
                module = getattr(module, "_modules", {}).get(name)
            if type(module) is not cls or not runs_plainly(module):
                return False
        return not _has_any_global_hook()


def _variant(
    owner: nn.Module, cls: type[nn.Module], key: GraphKey, rewrites: Iterable[Rewrite]
) -> tuple[_Variant, dict[nn.Module, str], bool]:
    """The variant of `owner` for calls like `key`, what is fused in it, and whether other types of
    arguments may give another graph."""
    graph, checks_types = trace(owner, cls, key)
    calls = _calls(graph)
    fused: dict[nn.Module, str] = {}
    for rewrite in rewrites:
        for path, what in rewrite(graph, owner).items():
            fused.setdefault(owner.get_submodule(path), what)
    taken = [(path.split("."), type(owner.get_submodule(path))) for path in calls - _calls(graph)]
    return _Variant(_compiled(graph, cls), taken), fused, checks_types


def _calls(graph: fx.Graph) -> Counter[str]:
    """How often `graph` calls each module, by its path."""
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_module")


def _compiled(graph: fx.Graph, cls: type[nn.Module]) -> Callable[..., Any]:
    """`graph` as a method."""
    code = graph.python_code(root_module="self")
    # Tracebacks show lines of it.
    name = f"<fused {cls.__name__}.forward, {next(_number)}>"
    linecache.cache[name] = (len(code.src), None, code.src.splitlines(keepends=True), name)
    scope = dict(code.globals)
    exec(compile(code.src, name, "exec"), scope)
    return scope["forward"]
