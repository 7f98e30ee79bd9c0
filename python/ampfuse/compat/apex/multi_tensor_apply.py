"""``apex.multi_tensor_apply``, and what the operations that it applies have in common.

It calls an ``amp_C`` operation with a chunk size, without effect. In common are the checks of lists
of tensors, and the flag.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampfuse.torch_utils import FLOAT_DTYPES, HALF_DTYPES

__all__ = ["MultiTensorApply", "multi_tensor_applier"]

TensorLists = Sequence[Sequence[Tensor]]
_FORMATS = torch.contiguous_format, torch.channels_last, torch.channels_last_3d

Lists = dict[str, list[Tensor]]
# The lists of an operation, by name and in order. The value says which dtype is allowed: "float32",
# "half", or the name of the list whose dtype it must share. A list that names itself may have any
# dtype.
Types = Mapping[str, str]
_ALLOWED = {"float32": (torch.float32,), "half": HALF_DTYPES}


class MultiTensorApply:
    """``applier(op, noop_flag, tensor_lists, *args)`` is ``op(chunk_size, noop_flag, ...)``."""

    available, warned = True, False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], *args: Any) -> Any:
        return op(self.chunk_size, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


# --- for amp_C ------------------------------------------------------------------------------------


def rows(name: str, lists: TensorLists, depth: int) -> list[list[Tensor]]:
    """The lists, each tensor as a flat view of its memory; kernels check devices and sizes.

    Shapes in a row may differ, but not orders of memory that would pair other elements.
    """
    if len(lists) != depth:
        raise RuntimeError(f"{name} takes {depth} list(s) of tensors, got {len(lists)}.")
    if not lists[0]:
        raise RuntimeError(f"{name}: the first list is empty.")
    for k, tensors in enumerate(lists):
        if (count := len(tensors)) != len(lists[0]):
            raise RuntimeError(f"{name}: list 0 has {len(lists[0])} tensors, list {k} has {count}.")
        for i, (first, tensor) in enumerate(zip(lists[0], tensors, strict=True)):
            if not any(tensor.is_contiguous(memory_format=each) for each in _FORMATS):
                where = f"{name}: tensor {i} of list {k}"
                raise RuntimeError(f"{where} is neither contiguous nor channels-last.")
            if tensor.shape == first.shape and not _same_order(tensor, first):
                raise RuntimeError(
                    f"{name}: tensor {i} has strides {first.stride()} in list 0 and "
                    f"{tensor.stride()} in list {k}: their elements would be paired wrongly. Make "
                    "both contiguous, or both channels-last."
                )
    return [[t.detach().as_strided((t.numel(),), (1,)) for t in tensors] for tensors in lists]


def without_integers(run: Callable[..., Any], *lists: list[Tensor]) -> list[list[Tensor]]:
    """`run` on each row that holds integers, which no kernel takes; the lists of other rows."""
    table = list(zip(*lists, strict=True))
    is_integer = [any(not t.is_floating_point() for t in row) for row in table]
    with torch.no_grad():
        for row in itertools.compress(table, is_integer):
            run(*row)
    return [[t for t, i in zip(each, is_integer, strict=True) if not i] for each in lists]


def typed_rows(name: str, lists: TensorLists, *types: Types) -> Lists:
    """Check `lists` against the description in `types` that has as many lists, and return the flat
    tensors by list name."""
    chosen = next((each for each in types if len(each) == len(lists)), types[0])
    columns = rows(name, lists, len(chosen))
    for i, row in enumerate(zip(*columns, strict=True)):
        allowed = dict(_ALLOWED)  # and from the first tensor of a list on, its type
        for k, (same_as, tensor) in enumerate(zip(chosen.values(), row, strict=True)):
            if tensor.dtype not in allowed.get(same_as, FLOAT_DTYPES):
                expected = " or ".join(map(str, allowed.get(same_as, FLOAT_DTYPES)))
                raise RuntimeError(
                    f"{name}: tensor {i} of list {k} is {tensor.dtype}; it must be {expected}, "
                    f"as list 0 has {row[0].dtype} there."
                )
            allowed.setdefault(same_as, (tensor.dtype,))
    return dict(zip(chosen, columns, strict=True))


def _same_order(a: Tensor, b: Tensor) -> bool:
    """Strides agree wherever a dimension has more than one element."""
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return a.numel() == 0 or all(x == y for size, x, y in strides if size > 1)


def set_flag(noop_flag: Tensor, overflow: Tensor) -> None:
    """Set `noop_flag` where `overflow` is positive; it is never cleared."""
    seen = (overflow > 0).to(device=noop_flag.device, dtype=noop_flag.dtype)
    with torch.no_grad():
        torch.maximum(noop_flag, seen.expand_as(noop_flag), out=noop_flag)


def checked(operation: Callable[..., Any], *args: Any) -> Any:
    """`operation`, with amp_C's type of error."""
    try:
        return operation(*args)
    except (TypeError, ValueError) as error:
        raise RuntimeError(str(error)) from error
