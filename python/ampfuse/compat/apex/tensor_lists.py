"""What the operations of ``amp_C`` ask of lists of tensors and of the flag."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampfuse.torch_utils import FLOAT_DTYPES, HALF_DTYPES

TensorLists = Sequence[Sequence[Tensor]]
_FORMATS = torch.contiguous_format, torch.channels_last, torch.channels_last_3d


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


def typed_rows(name: str, lists: TensorLists, *kinds: str) -> dict[str, list[Tensor]]:
    """The rows of `lists` by the names, and of the types, of one of `kinds`.

    A kind is ``"grads:a params:F ..."``, a name and a type for each list: F float32, H a half type,
    other letters any of them, the same letter in a row the same type.
    """
    texts = [kind.split() for kind in kinds]
    text = next((t for t in texts if len(t) == len(lists)), texts[0])
    found = rows(name, lists, len(text))
    names, letters = zip(*(item.split(":") for item in text), strict=True)
    for i, row in enumerate(zip(*found, strict=True)):
        known = {"F": (torch.float32,), "H": HALF_DTYPES}
        for k, (letter, tensor) in enumerate(zip(letters, row, strict=True)):
            allowed = known.get(letter, FLOAT_DTYPES)
            if tensor.dtype not in allowed:
                raise RuntimeError(
                    f"{name}: tensor {i} of list {k} is {tensor.dtype}; it must be "
                    f"{' or '.join(map(str, allowed))}, as list 0 has {row[0].dtype} there."
                )
            known.setdefault(letter, (tensor.dtype,))
    return dict(zip(names, found, strict=True))


def _same_order(a: Tensor, b: Tensor) -> bool:
    """Strides agree wherever a dimension has more than one element."""
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return a.numel() == 0 or all(x == y for size, x, y in strides if size > 1)


def set_flag(noop_flag: Tensor, found: Tensor) -> None:
    """Set `noop_flag` where `found` is positive; it is never cleared."""
    seen = (found > 0).to(device=noop_flag.device, dtype=noop_flag.dtype)
    with torch.no_grad():
        torch.maximum(noop_flag, seen.expand_as(noop_flag), out=noop_flag)


def checked(operation: Callable[..., Any], *args: Any) -> Any:
    """`operation`, with amp_C's type of error."""
    try:
        return operation(*args)
    except (TypeError, ValueError) as error:
        raise RuntimeError(str(error)) from error
