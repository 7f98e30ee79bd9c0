"""An operation of a training step: who called it, what it read, and whether its results are finite.

Looking at the values of a tensor synchronizes with the device. The look is not part of the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import linecache
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_leaves

from ampfuse import pytree
from ampfuse.amp.float32_output import Float32Output
from ampfuse.optim.sharding import local
from ampfuse.torch_utils import disable_current_modes

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_AMPFUSE = os.path.dirname(os.path.dirname(__file__))
# Frames in these files are not the user's.
_PARTS = ("amp/", "compat/", "insight/", "nn/", "optim/", "pytree.py", "torch_utils.py")
_INTERNAL = (_TORCH, contextlib.__file__, *(os.path.join(_AMPFUSE, part) for part in _PARTS))
# The functions of torch that are written in Python, such as F.cross_entropy.
_FUNCTIONAL = (os.path.join(_TORCH, "nn", "functional.py"), os.path.join(_TORCH, "functional.py"))
# In these files the loss is multiplied by a loss scale.
_SCALERS = (
    os.path.join(_TORCH, "amp", "grad_scaler.py"),
    os.path.join(_TORCH, "distributed", "fsdp", "sharded_grad_scaler.py"),
    os.path.join(_AMPFUSE, "amp", "scale_loss.py"),
)
# Operators whose name is not that of the function that users call.
_PUBLIC_NAMES = {
    "to_copy": "to",
    "copy": "to",
    "addmm": "linear",
    "mm": "matmul",
    "bmm": "matmul",
    "convolution": "conv",
    "native_layer_norm": "layer_norm",
}
# Operators that write to their first argument without reading it.
_OVERWRITES = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_"})

# --- who called it --------------------------------------------------------------------------------


class CallSite(NamedTuple):
    """The module that called an operation, the operation's public name, and the file and line."""

    module: nn.Module | None = None
    operation: str = ""
    place: tuple[str, int] | None = None

    @property
    def line(self) -> str | None:
        """The line as text: ``"train.py:14: y = x.exp()"``."""
        if self.place is None:
            return None
        file, number = self.place
        return f"{file}:{number}: {linecache.getline(file, number).strip()}"


def callers(frame: Any) -> tuple[tuple[str, int] | None, str | None]:
    """The user's file and line that `frame` runs for, and the torch function written in Python."""
    function = None
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_INTERNAL):
            return (file, frame.f_lineno), function
        if function is None and file in _FUNCTIONAL:
            function = frame.f_code.co_name.strip("_")
        frame = frame.f_back
    return None, function


def scaler_frame(frame: Any) -> Any:
    """The frame of the loss scaler that `frame` runs for; None if the user's code comes first."""
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        if frame.f_code.co_filename in _SCALERS:
            return frame
        frame = frame.f_back
    return None


def public_name(func: Any) -> str:
    """The name under which users know an operator: ``matmul`` for ``aten::mm``."""
    name = func._schema.name.rpartition("::")[2].strip("_")
    return _PUBLIC_NAMES.get(name, name)


# --- the operation --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Operation:
    """One call of an operator that torch dispatched, in the phase "forward" or "backward".

    `site` is who called it; in the backward pass, who called the forward operation.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    phase: str
    site: CallSite

    @property
    def writes(self) -> bool:
        """Whether it writes to its arguments."""
        return any(map(_is_written, self.func._schema.arguments))

    def before_writing(self, on_copy: Callable[[Tensor, Tensor], None]) -> Operation:
        """The same, with copies of the tensors that it is about to write to.

        A copy of a tensor that it does not read is zero. For the others ``on_copy(tensor, copy)``
        is called.
        """
        arguments = self.func._schema.arguments
        overwrites = self.func._schema.name.rpartition("::")[2] in _OVERWRITES
        names = [argument.name for argument in arguments]
        named = dict(zip(names, self.args, strict=False)) | self.kwargs

        def copied(item: Any, is_read: bool) -> Any:
            if not isinstance(item, Tensor):
                return item
            copy = item.detach().clone()
            if not is_read:
                return copy.zero_()
            on_copy(item, copy)
            return copy

        for argument in arguments:
            if argument.name in named and _is_written(argument):
                copy = functools.partial(copied, is_read=not (overwrites or argument.is_out))
                named[argument.name] = pytree.replace(named[argument.name], copy)
        args = tuple(named.pop(name) for name in names[: len(self.args)])
        return dataclasses.replace(self, args=args, kwargs=named)

    def inputs(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return list(pytree.tensors((self.args, self.kwargs)))

    def numbers(self) -> list[float]:
        """The floats among the arguments."""
        leaves = tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, float)]

    def largest_input(self) -> float | None:
        """The largest finite magnitude among the arguments."""
        sizes = [*map(_magnitude, filter(is_readable, self.inputs())), *map(abs, self.numbers())]
        return max(filter(math.isfinite, sizes), default=None)

    def largest_result(self, index: int) -> float | None:
        """The largest magnitude in result `index`, computed once more in a wider type.

        None if that is not possible.
        """
        func = self.func
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if func.namespace not in ("aten", "ampfuse") or is_random or "out" in self.kwargs:
            return None
        widest = torch.float64 if func.namespace == "aten" else torch.float32  # ampfuse has no FP64

        def wider(dtype: torch.dtype) -> torch.dtype:
            if not dtype.is_floating_point or dtype.itemsize > 4:
                return dtype
            return widest if dtype == torch.float32 else torch.float32

        def widened(item: Any) -> Any:
            if isinstance(item, Tensor):
                return item.detach().to(wider(item.dtype))
            return wider(item) if isinstance(item, torch.dtype) else item

        args, kwargs = pytree.replace(self.args, widened), pytree.replace(self.kwargs, widened)
        try:
            with torch.no_grad():
                out = func(*args, **kwargs)
            return _magnitude(list(pytree.tensors(out))[index])
        except (RuntimeError, TypeError, NotImplementedError, IndexError):  # no such kernel
            return None


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


# --- values ---------------------------------------------------------------------------------------


def is_readable(tensor: Tensor) -> bool:
    """Whether the values of `tensor` can be read, and inf or NaN can be among them."""
    return has_values(tensor) and tensor.is_floating_point()


def has_values(tensor: Tensor) -> bool:
    """Whether the values of `tensor` can be read."""
    if is_functorch_wrapped_tensor(tensor):  # what it wraps is dispatched too
        return False
    tensor = local(tensor)
    ordinary = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    return ordinary and tensor.numel() > 0 and not tensor.is_meta


def address(tensor: Tensor) -> int:
    """Where the memory of `tensor` begins; views have that of the tensor they view."""
    data = tensor.data_in_memory if isinstance(tensor, Float32Output) else local(tensor)
    return data.untyped_storage().data_ptr()


def kind_of(tensor: Tensor) -> str | None:
    """What `tensor` holds: "nan", else "inf", else "-inf"; None if all values are finite."""
    if not is_readable(tensor):
        return None
    low, high = _range(tensor)
    if math.isnan(low):
        return "nan"
    return "inf" if high == math.inf else "-inf" if low == -math.inf else None


def _magnitude(tensor: Tensor) -> float:
    return max(map(abs, _range(tensor)))


def _range(tensor: Tensor) -> tuple[float, float]:
    """The smallest and the largest value; NaN if one is NaN."""
    with torch.no_grad(), disable_current_modes(), torch._C.DisableTorchFunctionSubclass():
        tensor = local(tensor).detach()
        if tensor.itemsize < 2:
            tensor = tensor.float()
        low, high = torch.stack(torch.aminmax(tensor)).tolist()
    return low, high
