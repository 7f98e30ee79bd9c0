"""Outputs of models that compute in half: FP32, cast when somebody looks at them.

A loss in half precision would be wrong without an error: a scaled gradient of 65536 does not fit
FP16, and a mean over many elements keeps three digits. For logits over many classes an FP32 copy
and its gradient take more memory and time than the loss itself, and ``F.cross_entropy`` needs
neither: :func:`ampfuse.nn.cross_entropy` reads half logits. So the cast waits. Views of the output
wait with it; to every other function the output is the FP32 tensor, made at the first one and kept.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ampfuse import trees
from ampfuse.nn.cross_entropy import cross_entropy
from ampfuse.optim.masters import HALF_DTYPES


class Float32Output(Tensor):
    """A half tensor that is a float32 tensor to every function but a loss.

    Pickles and deep-copies as a plain float32 tensor. What looks at memory below torch's functions
    (an ``autograd.Function``, a C++ extension) sees the half tensor.
    """

    _float32: Tensor | None = None  # once it is made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func == _DTYPE:
                return torch.float32
            if func in _FACTS:
                return func(*args, **kwargs)
            if func is F.cross_entropy or func in _VIEWS:
                half = as_half((args, kwargs))
                if not any(isinstance(t, cls) for t in trees.tensors(half)):
                    if func is F.cross_entropy:
                        return cross_entropy(*half[0], **half[1])
                    return trees.replace(func(*half[0], **half[1]), _again)
            return func(*trees.replace(args, _cast), **trees.replace(kwargs, _cast))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _cast(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _cast(self).__reduce_ex__(protocol)


_DTYPE = Tensor.dtype.__get__  # type: ignore[attr-defined]
# What says nothing of the values.
_FACTS = frozenset(
    [getattr(Tensor, name).__get__ for name in ("shape", "ndim", "device", "requires_grad")]
    + [getattr(Tensor, name) for name in ("size", "dim", "numel", "stride", "is_contiguous")]
    + [Tensor.__len__, Tensor.is_floating_point, torch.is_floating_point]
)
_VIEWS = frozenset(
    function
    for name in """
        __getitem__ chunk contiguous flatten index_select movedim mT narrow permute reshape select
        split squeeze swapaxes t transpose unflatten unsqueeze view
    """.split()
    for owner in (Tensor, torch)
    if (function := getattr(owner, name, None)) is not None
)


def widen(outputs: Any, model: torch.nn.Module) -> Any:
    """`outputs` of `model` with the half tensors in it FP32, sooner or later.

    At once where the cast is all there is to win (no gradient is wanted), where whatever traces
    sees to it, and where torch hands outputs on below its functions (parallel models).
    """
    at_once = (
        not torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or getattr(model, "_is_replica", False)
        or (torch.distributed.is_available() and torch.distributed.is_initialized())
    )

    def leaf(item: Any) -> Any:
        if type(item) is not Tensor or item.dtype not in HALF_DTYPES:
            return item
        lazy = item.requires_grad and not at_once
        return item.as_subclass(Float32Output) if lazy else item.float()

    return trees.replace(outputs, leaf)


def as_half(value: Any) -> Any:
    """`value` with each output in it that nobody has looked at turned into a plain half tensor."""
    return trees.replace(value, _half)


def _again(view: Any) -> Any:
    return view.as_subclass(Float32Output) if isinstance(view, Tensor) else view


def _half(item: Any) -> Any:
    if isinstance(item, Float32Output) and item._float32 is None:
        with torch._C.DisableTorchFunctionSubclass():
            return item.view_as(item)
    return item


def _cast(item: Any) -> Any:
    if not isinstance(item, Float32Output):
        return item
    if item._float32 is not None:
        return item._float32
    with torch._C.DisableTorchFunctionSubclass():
        value = item.view_as(item).float()
    if not torch.compiler.is_dynamo_compiling():
        item._float32 = value
    return value
