"""The ``forward`` of a module: whose it is, and where another can take its place."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


class WrappedForward:
    """Mixed into the class of a module whose ``forward`` runs around its original class's.

    Such a class has two bases, this (or a subclass) and the original class. A ``forward`` that hung
    on the instance, and hid the class's, is the attribute ``_amp_inner_forward``.
    """


def original_class(wrapping: type) -> type:
    """The class around whose ``forward`` a :class:`WrappedForward` runs."""
    return wrapping.__bases__[1]


def replaceable_forward(module: nn.Module) -> tuple[Any, str]:
    """The class with `module`'s own ``forward``, and the attribute that takes another's place."""
    if isinstance(module, WrappedForward):
        return original_class(type(module)), "_amp_inner_forward"
    return type(module), "forward"


def eager_module(model: nn.Module) -> nn.Module:
    """`model`, or the module inside the wrapper that ``torch.compile`` put around it.

    Of a proxy, the module that it stands for.
    """
    dynamo = sys.modules.get("torch._dynamo")  # importing it takes a second; a wrapper already has
    if dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        return model._orig_mod
    if is_proxy(model):  # whoever hands on modules(), its first one is the root
        return next(iter(model.modules()), model)
    return model


def is_proxy(model: nn.Module) -> bool:
    """True for an object that passes for a module (its ``__class__`` is a property), but is none.

    Assigning its ``__class__`` would reach another object.
    """
    return not issubclass(type(model), nn.Module)
