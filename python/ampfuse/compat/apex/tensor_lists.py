"""What the operations of ``amp_C`` ask of lists of tensors and of the flag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampfuse.optim.masters import FLOAT_DTYPES, HALF_DTYPES

TensorLists = Sequence[Sequence[Tensor]]


def rows(name: str, lists: TensorLists, depth: int) -> list[list[Tensor]]:
    """The lists, checked, each tensor as a flat view of its memory.

    Tensors of a row may have other shapes, but not orders of memory in which their elements would
    not belong together.
    """
    if len(lists) != depth:
        raise RuntimeError(f"{name} takes {depth} list(s) of tensors, not {len(lists)}.")
    length = len(lists[0])
    if length == 0:
        raise RuntimeError(f"{name}: the first list is empty.")
    for k, tensors in enumerate(lists):
        if len(tensors) != length:
            raise RuntimeError(f"{name}: list 0 has {length} tensors, list {k} {len(tensors)}.")
    for i, row in enumerate(zip(*lists, strict=True)):
        _check_row(name, i, row, lists[0][0].device)
    return [[_flat(t) for t in tensors] for tensors in lists]


def typed_rows(name: str, lists: TensorLists, *kinds: str) -> dict[str, list[Tensor]]:
    """The rows of `lists` by the names, and of the types, of one of `kinds`.

    A kind is ``"grads:a params:F ..."``, a name and a type for each list. F is float32, H a half
    type. Other letters are float32 or a half type, the same letter in a row the same type.
    """
    texts = [kind.split() for kind in kinds]
    text = next((t for t in texts if len(t) == len(lists)), texts[0])
    found = rows(name, lists, len(text))
    names, letters = zip(*(item.split(":") for item in text), strict=True)
    for i, row in enumerate(zip(*found, strict=True)):
        for k, (letter, tensor) in enumerate(zip(letters, row, strict=True)):
            allowed = {"F": (torch.float32,), "H": HALF_DTYPES}.get(letter, FLOAT_DTYPES)
            if tensor.dtype not in allowed:
                types = ", ".join(str(t) for t in allowed)
                raise RuntimeError(
                    f"{name}: tensor {i} of list {k} is {tensor.dtype}; it takes {types}."
                )
            first = letters.index(letter)
            if letter.islower() and row[first].dtype != tensor.dtype:
                raise RuntimeError(
                    f"{name}: tensor {i} of list {k} is {tensor.dtype}, not {row[first].dtype} as "
                    f"in list {first}."
                )
    return dict(zip(names, found, strict=True))


def _check_row(name: str, i: int, row: tuple[Tensor, ...], device: torch.device) -> None:
    first = row[0]
    for k, tensor in enumerate(row):
        if tensor.device != device:
            raise RuntimeError(
                f"{name}: tensor {i} of list {k} is on {tensor.device}, not {device}."
            )
        if tensor.numel() != first.numel():
            raise RuntimeError(
                f"{name}: tensor {i} has {first.numel()} elements in list 0 and {tensor.numel()} "
                f"in list {k}."
            )
        if not _is_dense(tensor):
            raise RuntimeError(
                f"{name}: tensor {i} of list {k} is neither contiguous nor channels-last."
            )
        if tensor.shape == first.shape and not _same_order(tensor, first):
            raise RuntimeError(
                f"{name}: tensor {i} has strides {first.stride()} in list 0 and "
                f"{tensor.stride()} in list {k}: their elements would be paired wrongly. Make "
                "both contiguous, or both channels-last."
            )


def _is_dense(tensor: Tensor) -> bool:
    formats = torch.contiguous_format, torch.channels_last, torch.channels_last_3d
    return any(tensor.is_contiguous(memory_format=each) for each in formats)


def _same_order(a: Tensor, b: Tensor) -> bool:
    """Strides agree wherever a dimension has more than one element."""
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return a.numel() == 0 or all(x == y for size, x, y in strides if size > 1)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def no_overflow(noop_flag: Tensor) -> Tensor:
    """A flag of the kernels, not set."""
    return torch.zeros((), dtype=torch.float32, device=noop_flag.device)


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
