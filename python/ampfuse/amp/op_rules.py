"""Which operations run in low precision, in FP32, or in the widest type of their arguments.

:class:`OpRules` holds names, so that ``torch.add``, ``Tensor.add`` and ``+`` need no entry each in
several tables, and so that a model which carries rules pickles. It is for who wants other types
than autocast's, or the same ones on every device: autocast on the CPU knows much shorter lists.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ampfuse.amp import trees, weight_cache

# Autocast casts and flattens the weights of cuDNN's recurrent layers itself. On the CPU it leaves
# these layers alone.
RNN_LAYERS = frozenset({"gru", "lstm", "rnn_relu", "rnn_tanh"})

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class OpRules:
    """Names of functions, methods (``add_`` too) and operators (``__add__``), by what is cast.

    Attributes:
        low: arguments are cast to the low-precision type.
        float32: arguments are cast to float32.
        not_in_place: these, under the name of their in-place form, refuse to write a half tensor.
        promote: arguments are cast to the widest type among them.
        banned: (name, reason) of functions that refuse half arguments.
    """

    low: frozenset[str] = frozenset()
    float32: frozenset[str] = frozenset()
    not_in_place: frozenset[str] = frozenset()
    promote: frozenset[str] = frozenset()
    banned: tuple[tuple[str, str], ...] = ()

    def apply(self, name: str, dtype: torch.dtype, args: Any, kwargs: Any) -> Arguments:
        """The arguments that the function called `name` gets where `dtype` is the low type.

        Raises:
            NotImplementedError: a banned function, or one that writes a half tensor in place
                although it has to compute in FP32, met a half argument.
        """
        rule = self._by_name.get(name)
        if rule is None:
            return args, kwargs
        return rule(dtype, args, kwargs)

    @functools.cached_property
    def _by_name(self) -> dict[str, Callable[[torch.dtype, Any, Any], Arguments]]:
        table: dict[str, Callable[[torch.dtype, Any, Any], Arguments]] = {}
        for name in self.low | self.promote:
            table[name + "_"] = _as_self
        for name in self.not_in_place:
            table[name + "_"] = functools.partial(_float32_in_place, name + "_")
        table.update(dict.fromkeys(self.float32, _to_float32))
        table.update(dict.fromkeys(self.promote, _widest))
        table.update(dict.fromkeys(self.low, _to_low))
        table.update(dict.fromkeys(RNN_LAYERS, _recurrent))
        for name, reason in self.banned:
            table[name] = functools.partial(_refuse, reason)
        return table


def name_of(function: Any) -> str:
    """What rules call `function`: ``torch.linalg.norm`` too is ``norm``."""
    name = getattr(function, "__name__", "")  # some callables of torch's have none
    return name.removeprefix("linalg_").removeprefix("special_")


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """`value` with the floating point tensors in it cast to `dtype`, weights through the cache."""

    def leaf(item: Any) -> Any:
        if isinstance(item, Tensor) and item.is_floating_point() and item.dtype != dtype:
            return weight_cache.cast(item, dtype)
        return item

    return trees.replace(value, leaf)


def widest_dtype(tensors: Iterable[Tensor]) -> torch.dtype | None:
    """The type that holds every floating point value in `tensors`; None if there are none."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def is_half(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def _cast_all(dtype: torch.dtype, args: Any, kwargs: Any) -> Arguments:
    # `out` is written, not read: the caller chose its type.
    kept = {key: value for key, value in kwargs.items() if key == "out"}
    return to_dtype(args, dtype), {**to_dtype(kwargs, dtype), **kept}


_to_low = _cast_all


def _to_float32(_: torch.dtype, args: Any, kwargs: Any) -> Arguments:
    return _cast_all(torch.float32, args, kwargs)


def _widest(_: torch.dtype, args: Any, kwargs: Any) -> Arguments:
    dtype = widest_dtype(trees.tensors((args, kwargs)))
    return (args, kwargs) if dtype is None else _cast_all(dtype, args, kwargs)


def _as_self(_: torch.dtype, args: Any, kwargs: Any) -> Arguments:
    """In place: the others follow the tensor that is written, if it is half or float."""
    target = args[0]
    if not isinstance(target, Tensor) or not (is_half(target) or target.dtype == torch.float32):
        return args, kwargs
    others, kwargs = _cast_all(target.dtype, args[1:], kwargs)
    return (target, *others), kwargs


def _float32_in_place(name: str, _: torch.dtype, args: Any, kwargs: Any) -> Arguments:
    target = args[0]
    if isinstance(target, Tensor) and is_half(target):
        raise NotImplementedError(
            f"{name} would overwrite a {target.dtype} tensor, but it has to compute in float32. "
            f"Use {name.rstrip('_')} instead, which returns a float32 tensor, or cast the tensor "
            "first (x = x.float()), or put the line into amp.disable_casts()."
        )
    others, kwargs = _cast_all(torch.float32, args[1:], kwargs)
    return (target, *others), kwargs


def _recurrent(dtype: torch.dtype, args: Any, kwargs: Any) -> Arguments:
    first = next(trees.tensors(args), None)
    if first is None or first.device.type != "cpu":
        return args, kwargs
    return _cast_all(dtype, args, kwargs)


def _refuse(reason: str, _: torch.dtype, args: Any, kwargs: Any) -> Arguments:
    if any(is_half(tensor) for tensor in trees.tensors((args, kwargs))):
        raise NotImplementedError(reason)
    return args, kwargs
