"""Walk the containers that models take and return, and replace the tensors in them.

What comes out has the type of what went in: lists, tuples, namedtuples, torch's return types,
mappings (``OrderedDict``, Hugging Face's ``ModelOutput``, ...), dataclasses and what is registered
with torch's pytree are rebuilt as themselves. Only what holds a replaced item is rebuilt;
everything else is handed on as the same object. Other objects, sets and generators are left alone.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as torch_pytree

_DICTS = (dict, OrderedDict)  # Dynamo supports neither copies nor attributes of these


def replace(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """`value` with every item x, at any depth, for which ``leaf(x) is not x`` replaced by it.

    `leaf` sees containers too, before their items, and may replace them whole.
    """
    replaced = leaf(value)
    old = None if isinstance(value, Tensor) else _items(value)
    if replaced is not value or old is None:
        return replaced
    items = [replace(item, leaf) for item in old]
    if all(map(_same, items, old)):
        return value
    if isinstance(value, (list, tuple)):
        # A namedtuple takes its fields one by one.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        entries = dict(zip(value, items, strict=True))
        if type(value) in _DICTS or not isinstance(value, MutableMapping):
            return OrderedDict(entries) if isinstance(value, OrderedDict) else entries
        rebuilt = copy.copy(value)
        for key, item in entries.items():
            rebuilt[key] = item
        return rebuilt
    if is_dataclass(value):
        rebuilt = copy.copy(value)
        for name, item, was in zip(_fields(value), items, old, strict=True):
            if not _same(item, was):
                object.__setattr__(rebuilt, name, item)  # frozen ones too
        return rebuilt
    _, spec = torch_pytree.tree_flatten(value, is_leaf=lambda item: item is not value)
    return torch_pytree.tree_unflatten(items, spec)


def _items(value: Any) -> list[Any] | None:
    """What :func:`replace` finds in a container; None of other objects."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, Mapping):
        return list(value.values())
    if is_dataclass(value):
        return [getattr(value, name) for name in _fields(value)]
    if type(value) in torch_pytree.SUPPORTED_NODES:
        return torch_pytree.tree_flatten(value, is_leaf=lambda item: item is not value)[0]
    return None


def walks(value: Any) -> bool:
    """Whether :func:`replace` looks into `value`."""
    return _items(value) is not None


def is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> list[str]:
    """The fields of a dataclass's instance that are set."""
    return [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]


def _same(new: Any, old: Any) -> bool:
    if not is_dynamo_compiling():
        return new is old
    # To Dynamo a tensor is itself as a subclass too, and of tuples it cannot tell.
    if type(new) is not type(old):
        return False
    return all(map(_same, new, old)) if isinstance(new, tuple) else new is old


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in `value`, at any depth: in what :func:`replace` looks into."""
    if isinstance(value, Tensor):
        yield value
    else:
        for item in _items(value) or ():
            yield from tensors(item)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` with the floating point tensors in it, at any depth, cast to `dtype`.

    Integer, bool and complex tensors keep their type. A batch class of the user's opts in by a
    ``to`` with a parameter `dtype`.
    """

    def leaf(item: Any) -> Any:
        if isinstance(item, Tensor):
            wanted = item.is_floating_point() and item.dtype is not dtype
            return item.to(dtype) if wanted else item
        if isinstance(item, PackedSequence):  # its own `to` would cast integer data as well
            return item.to(dtype) if item.data.is_floating_point() else item
        return _cast_object(item, dtype)

    return replace(value, leaf)


def _cast_object(item: Any, dtype: torch.dtype) -> Any:
    # A module given as an argument would be cast in place; its owner decides about that. A class
    # is no instance: its `to` is an unbound function.
    if type(item) in _DICTS or not hasattr(item, "to") or isinstance(item, (torch.nn.Module, type)):
        return item
    try:
        takes_dtype = "dtype" in inspect.signature(item.to).parameters
    except (TypeError, ValueError):  # a builtin without a signature, or no callable at all
        return item
    return item.to(dtype=dtype) if takes_dtype else item
