"""No attention mask where transformers' models need none.

Their decoders take sequences for packed ones where positions restart. To find out, an eager forward
waits for the device, and one that is compiled or captured builds a mask, with which no flash
kernel runs. Positions that a model counted itself never restart.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from ampfuse.nn.fuse.forwards import replaceable_forward
from ampfuse.nn.norm_act import mark_fused


def skip_packing(model: nn.Module) -> bool:
    """Have the decoders in `model` take positions that they count themselves for those of whole
    sequences; True if there are any, without a ``forward`` of their own."""
    found = False
    for module in model.modules():
        cls, attribute = replaceable_forward(module)
        if cls.__module__.startswith("transformers.") and attribute not in vars(module):
            forward = _forward_without_packing(cls)
            if forward is not None:
                vars(module)[attribute] = types.MethodType(mark_fused(forward), module)
                found = True
    return found


def _forward_without_packing(cls: Any) -> Callable[..., Any] | None:
    """That of `cls`, but that a call without positions makes its masks without them too; None if
    it is no decoder's."""
    original, written = cls.forward, inspect.unwrap(cls.forward)
    makers = {
        name: _called_without_positions(written.__globals__[name])
        for name in written.__code__.co_names
        if getattr(written.__globals__.get(name), "__module__", "") == "transformers.masking_utils"
        and name.startswith("create_")
    }
    names = list(inspect.signature(written).parameters)
    if not makers or "position_ids" not in names or "arange" not in written.__code__.co_names:
        return None
    whole = _with_globals(original, makers)
    if whole is None:
        return None
    place = names.index("position_ids")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = (self, *args)[place] if place <= len(args) else kwargs.get("position_ids")
        return (whole if given is None else original)(self, *args, **kwargs)

    forward.__code__ = forward.__code__.replace()  # torch.compile counts compilations by it
    return functools.update_wrapper(forward, original)


def _called_without_positions(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    names = list(inspect.signature(make_mask).parameters)

    def without_positions(*args: Any, **kwargs: Any) -> Any:
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        kwargs.pop("position_ids", None)
        return make_mask(**kwargs)

    return without_positions


def _with_globals(function: Any, changed: dict[str, Any]) -> Any:
    """A copy of `function`, and of what it decorates, for which some globals are others; None if a
    decorator hides what it decorates."""
    scope, closure = {**function.__globals__, **changed}, function.__closure__ or ()
    if (inner := getattr(function, "__wrapped__", None)) is not None:
        places = [i for i, cell in enumerate(closure) if cell.cell_contents is inner]
        if not places or (copied := _with_globals(inner, changed)) is None:
            return None
        closure = tuple(
            types.CellType(copied) if i in places else cell for i, cell in enumerate(closure)
        )
    del scope["__name__"]  # by which torch.compile would look for the globals in the module
    copied = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, closure
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copied, function)
