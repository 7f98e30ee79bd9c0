"""Which operations run in low precision, in FP32, or in the widest type of their arguments.

:class:`OpRules` holds names, so that ``torch.add``, ``Tensor.add`` and ``+`` need no entry each in
several tables, and so that a model which carries rules pickles. It is for who wants other types
than autocast's, or the same ones on every device: autocast on the CPU knows much shorter lists.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampfuse import trees
from ampfuse.amp import weight_cache
from ampfuse.optim.masters import FLOAT_DTYPES, HALF_DTYPES

# Autocast casts and flattens the weights of cuDNN's recurrent layers itself. On the CPU it leaves
# these layers alone.
RNN_LAYERS = frozenset({"gru", "lstm", "rnn_relu", "rnn_tanh"})

Arguments = tuple[Sequence[Any], dict[str, Any]]
Rule = Callable[[torch.dtype, Any, Any], Arguments]


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

    @functools.cached_property
    def table(self) -> Mapping[str, Rule]:
        """The rules by name: what arguments a function gets where a type is the low one.

        A rule raises NotImplementedError where a banned function, or one that writes a half tensor
        in place although it has to compute in FP32, meets a half argument.
        """
        table: dict[str, Rule] = {}
        for name in self.low | self.promote:
            table[name + "_"] = _as_self
        for name in self.not_in_place:
            table[name + "_"] = functools.partial(_float32_in_place, name + "_")
        table.update(dict.fromkeys(self.float32, _to_float32))
        table.update(dict.fromkeys(self.promote, _widest))
        table.update(dict.fromkeys(self.low, _cast_all))
        table.update(dict.fromkeys(RNN_LAYERS, _recurrent))
        for name, reason in self.banned:
            table[name] = functools.partial(_refuse, reason)
        for operator in _AUGMENTED & table.keys():  # x += y is x.add_(y)
            table[operator] = _as_self
        return table

    @functools.cached_property
    def table_under_autocast(self) -> Mapping[str, Rule]:
        """The rules by name, less those that autocast follows by itself, in less time."""
        same = self.low & set(_PRODUCTS_OF_AUTOCAST.split())
        return {name: rule for name, rule in self.table.items() if name not in same}


# Those among the products that it has on every device.
_PRODUCTS_OF_AUTOCAST = """
    __matmul__ addmm baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d linear matmul mm scaled_dot_product_attention
"""

_AUGMENTED = frozenset(
    f"__i{name}__" for name in ("add", "div", "floordiv", "mul", "pow", "sub", "truediv")
)


@dataclasses.dataclass(eq=False)
class Scope:
    """By what functions are cast in one place: inside the forward of a model, or outside of all.

    Attributes:
        dtype: the low-precision type; None where nothing is cast.
        table: the rules for torch's functions; empty where autocast sees to them, or nobody.
        casts_cpu: False leaves CPU tensors alone: what loads and counts there is not the model.
    """

    dtype: torch.dtype | None = None
    table: Mapping[str, Rule] = dataclasses.field(default_factory=dict)
    casts_cpu: bool = True


AS_WRITTEN = Scope()


def name_of(function: Any) -> str:
    """What rules call `function`: ``torch.linalg.norm`` too is ``norm``."""
    function = getattr(function, "__wrapped__", function)  # of a wrapper Dynamo tells another name
    name = getattr(function, "__name__", "")  # some callables of torch's have none
    return name.removeprefix("linalg_").removeprefix("special_")


def to_dtype(value: Any, dtype: torch.dtype) -> Any:
    """`value` with the floating point tensors in it cast to `dtype`, weights through the cache."""
    if isinstance(value, Tensor):
        if value.dtype is dtype or not value.is_floating_point():
            return value
        return weight_cache.cast(value, dtype)
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, (tuple, list)) and value and isinstance(value[0], int):
        return value  # a shape
    return trees.replace(
        value, lambda item: to_dtype(item, dtype) if isinstance(item, Tensor) else item
    )


def widest_dtype(tensors: Iterable[Tensor]) -> torch.dtype | None:
    """The type that holds every floating point value in `tensors`; None if there are none."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def _cast_all(dtype: torch.dtype, args: Any, kwargs: Any) -> Arguments:
    for value in args:
        if isinstance(value, Tensor):
            if value.dtype is torch.float64 and _is_float64(args, kwargs):
                return args, kwargs  # who computes in float64 throughout means it
            break
    args = [to_dtype(value, dtype) for value in args]
    if kwargs:  # `out` is written, not read: the caller chose its type
        kwargs = {k: v if k == "out" else to_dtype(v, dtype) for k, v in kwargs.items()}
    return args, kwargs


def _to_float32(_: torch.dtype, args: Any, kwargs: Any) -> Arguments:
    return _cast_all(torch.float32, args, kwargs)


def _widest(_: torch.dtype, args: Any, kwargs: Any) -> Arguments:
    if len(args) == 2 and not kwargs and isinstance(args[0], Tensor):  # most are operators
        a, b = args
        if isinstance(b, (int, float)):
            return args, kwargs
        if isinstance(b, Tensor):
            if a.dtype is b.dtype:
                return args, kwargs
            if a.is_floating_point() and b.is_floating_point():
                dtype = torch.promote_types(a.dtype, b.dtype)
                return (to_dtype(a, dtype), to_dtype(b, dtype)), kwargs
    widest = widest_dtype(trees.tensors((args, kwargs)))
    return (args, kwargs) if widest is None else _cast_all(widest, args, kwargs)


def _is_float64(args: Any, kwargs: Any) -> bool:
    floating = (t for t in trees.tensors((args, kwargs)) if t.is_floating_point())
    return all(t.dtype is torch.float64 for t in floating)


def _as_self(_: torch.dtype, args: Any, kwargs: Any) -> Arguments:
    """In place: the others follow the tensor that is written, if it is half or float."""
    target = args[0]
    if not isinstance(target, Tensor) or target.dtype not in FLOAT_DTYPES:
        return args, kwargs
    others, kwargs = _cast_all(target.dtype, args[1:], kwargs)
    return (target, *others), kwargs


def _float32_in_place(name: str, _: torch.dtype, args: Any, kwargs: Any) -> Arguments:
    target = args[0]
    if isinstance(target, Tensor) and target.dtype in HALF_DTYPES:
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
    if any(tensor.dtype in HALF_DTYPES for tensor in trees.tensors((args, kwargs))):
        raise NotImplementedError(reason)
    return args, kwargs
