"""Choose the type in which a user's function computes at O1 and O4::

    @amp.float_function
    def my_loss(logits, target): ...

    amp.register_float_function(torch, "sigmoid")  # before amp.initialize

Autocast does not know an extension's functions, and a program may need another type for an
operation than most. These functions cast where autocast is on: in ``forward`` at O1 and O4, and
outside after :func:`~ampfuse.amp.cast_everywhere`. Elsewhere they do nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from ampfuse import pytree
from ampfuse.amp import cast_state

Function = TypeVar("Function", bound=Callable[..., Any])


def half_function(function: Function) -> Function:
    """Decorator: floating point tensors among the arguments of `function` are cast to float16.

    Tensors in lists, tuples and mappings too.

    Source: ``apex.amp.half_function``.
    """
    return _casting(function, lambda tensors: torch.float16)


def bfloat16_function(function: Function) -> Function:
    """Decorator: cast tensors for `function` like :func:`half_function`, to bfloat16."""
    return _casting(function, lambda tensors: torch.bfloat16)


def float_function(function: Function) -> Function:
    """Decorator: cast tensors for `function` like :func:`half_function`, to float32."""
    return _casting(function, lambda tensors: torch.float32)


def promote_function(function: Function) -> Function:
    """Decorator: cast tensors for `function` like :func:`half_function`, to the widest type."""
    return _casting(function, _widest)


def register_half_function(module: Any, name: str) -> None:
    """Make ``module.name`` a :func:`half_function` from the next ``amp.initialize`` at O1 or O4 on.

    `module` is a module or a class. The type takes precedence over the level's rule for a function
    of torch. Code that took the function from `module` before keeps the original.

    Raises:
        ValueError: `module` does not have the attribute.
    """
    _register(module, name, half_function)


def register_bfloat16_function(module: Any, name: str) -> None:
    """Make `name` of `module` a :func:`bfloat16_function`, see :func:`register_half_function`."""
    _register(module, name, bfloat16_function)


def register_float_function(module: Any, name: str) -> None:
    """Make `name` of `module` a :func:`float_function`, see :func:`register_half_function`."""
    _register(module, name, float_function)


def register_promote_function(module: Any, name: str) -> None:
    """Make `name` of `module` a :func:`promote_function`, see :func:`register_half_function`."""
    _register(module, name, promote_function)


_INHERITED = object()


class Replacements:
    """Attributes of third-party modules and classes that were replaced, to be put back.

    An attribute that was replaced again since stays as it is.
    """

    def __init__(self) -> None:
        # By the owner's id, as it may not be hashable: the owner, the original and ours.
        self._pairs: dict[tuple[int, str], tuple[Any, Any, Any]] = {}

    def __contains__(self, place: tuple[Any, str]) -> bool:
        return (id(place[0]), place[1]) in self._pairs

    def replace(self, owner: Any, name: str, ours: Any) -> None:
        """Set ``owner.name`` to `ours`."""
        original = vars(owner).get(name, _INHERITED)
        if (id(owner), name) in self._pairs:
            _, earlier_original, earlier_ours = self._pairs[id(owner), name]
            if original is earlier_ours:
                original = earlier_original
        self._pairs[id(owner), name] = owner, original, ours
        setattr(owner, name, ours)

    def put_back(self) -> None:
        """Restore the originals."""
        for (_, name), (owner, original, ours) in self._pairs.items():
            if vars(owner).get(name) is not ours:
                continue
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._pairs.clear()


_pending: list[tuple[Any, str, Callable[[Any], Any]]] = []
_installed = Replacements()


def install_registered() -> None:
    """Install the functions registered since the last call, each once. For ``initialize``."""
    for module, name, decorate in _pending:
        function = getattr(module, name)
        if getattr(function, "_amp_registered_by", None) is not decorate:
            function = decorate(function)
            function._amp_registered_by = decorate
            _installed.replace(module, name, function)
    _pending.clear()


def install_once(module: Any, name: str, decorate: Callable[[Any], Any]) -> None:
    """Replace ``module.name`` by ``decorate(module.name)``, unless it is installed already."""
    if (module, name) not in _installed:
        _installed.replace(module, name, decorate(getattr(module, name)))


def restore_registered() -> None:
    """Put back what :func:`install_registered` and :func:`install_once` have replaced."""
    _installed.put_back()


@contextlib.contextmanager
def registered_for_now() -> Iterator[None]:
    """Undo after the block what it installs; the next ``initialize`` installs it again."""
    global _pending, _installed
    before = _pending, _installed
    _pending, _installed = list(_pending), Replacements()
    try:
        yield
    finally:
        restore_registered()
        _pending, _installed = before


def _register(module: Any, name: str, decorate: Callable[[Any], Any]) -> None:
    if not hasattr(module, name):
        where = getattr(module, "__name__", repr(module))
        raise ValueError(f"{where} has no function {name!r} to register.")
    _pending.append((module, name, decorate))


def _casting(function: Any, choose: Callable[[list[Tensor]], torch.dtype]) -> Any:
    # Within torch's own function autocast's rule for it would undo the cast made here.
    own_rule = cast_state.disable_casts if _is_torchs(function) else contextlib.nullcontext

    @functools.wraps(function)
    def cast_first(*args: Any, **kwargs: Any) -> Any:
        given = pytree.tensors((args, kwargs))
        tensors = [t for t in given if t.is_floating_point() and not t.is_meta]
        if not any(torch.is_autocast_enabled(tensor.device.type) for tensor in tensors):
            return function(*args, **kwargs)
        dtype = choose(tensors)
        with own_rule():
            return function(*pytree.cast(args, dtype), **pytree.cast(kwargs, dtype))

    return cast_first


def _widest(tensors: list[Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])


def _is_torchs(function: Any) -> bool:
    module = getattr(function, "__module__", None)
    if module is None:  # methods of Tensor and many builtins say where they are by their class
        owner = getattr(function, "__objclass__", None) or type(getattr(function, "__self__", None))
        module = owner.__module__
    return module == "torch" or module.startswith("torch.")
