"""``amp_C``: norms, scaling and the loss scale of apex's extension, on CPU and CUDA tensors.

Every list operation takes ``(chunk_size, noop_flag, tensor_lists, ...)``. The flag is an int32
tensor of one element on the tensors' device, set to 1 when an input is not finite and never
cleared. Nothing waits for the device, and the chunk size has no effect. Tensors are float32,
float16 or bfloat16, each by itself; those at the same place of the lists have as many elements and
are read in the order of their memory. What does not fit is a RuntimeError.

Source: the argument orders and flags of NVIDIA apex's ``amp_C`` (BSD-3-Clause).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ampfuse import ops

TensorLists = Sequence[Sequence[Tensor]]

__all__ = [
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_scale",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]

_OPTIMIZERS = {
    "multi_tensor_sgd": "SGD",
    "multi_tensor_adam": "Adam",
    "multi_tensor_adam_capturable": "Adam",
    "multi_tensor_adam_capturable_master": "Adam",
    "multi_tensor_adagrad": "Adagrad",
    "multi_tensor_novograd": "NovoGrad",
    "multi_tensor_lamb": "LAMB",
    "multi_tensor_lamb_mp": "LAMB",
    "multi_tensor_lamb_stage1_cuda": "LAMB",
    "multi_tensor_lamb_stage2_cuda": "LAMB",
}


def __getattr__(name: str) -> Any:
    if name in _OPTIMIZERS:
        raise AttributeError(
            f"amp_C.{name} is not here yet: ampfuse.optim has {_OPTIMIZERS[name]} as an optimizer, "
            f"not as a function of lists. Here are {', '.join(__all__)}."
        )
    raise AttributeError(f"amp_C has no {name!r}; it has {', '.join(__all__)}.")


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float
) -> None:
    """``out = in * scale`` for the lists (in, out). Inputs are checked, not results."""
    src, dst = _rows("multi_tensor_scale", tensor_lists, 2)
    found = _found(noop_flag)
    _run(ops.scale, src, dst, float(scale), found)
    _set_flag(noop_flag, found)


def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    a: float,
    b: float,
    arg_to_check: int,
) -> None:
    """``out = a * x + b * y`` for the lists (x, y, out); checks -1 both, 0 x, 1 y."""
    x, y, out = _rows("multi_tensor_axpby", tensor_lists, 3)
    found = _found(noop_flag)
    _run(ops.axpby, x, y, out, float(a), float(b), found, int(arg_to_check))
    _set_flag(noop_flag, found)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """The L2 norm of everything in the one list, and of each tensor.

    Returns:
        ``(norm, norms)``: float32, of shapes (1,) and (n,), or (0,) without `per_tensor`.
    """
    (tensors,) = _rows("multi_tensor_l2norm", tensor_lists, 1)
    norm, norms = _run(ops.l2norm, tensors, bool(per_tensor))
    _set_flag(noop_flag, ~norm.isfinite())
    return norm.reshape(1), norms


def multi_tensor_l2norm_mp(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """:func:`multi_tensor_l2norm`, whatever the flag on entry (apex gave no norm if it was set)."""
    return multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    inv_scale: Tensor,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """:func:`multi_tensor_l2norm` of the tensors times `inv_scale` (float32, one element)."""
    norm, norms = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor)
    factor = inv_scale.detach().abs().reshape(1)
    return norm * factor, norms * factor


def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    scale: float,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """``out = in * scale`` for the lists (in, out), and the norm of the unscaled `in`."""
    src, _ = _rows("multi_tensor_l2norm_scale", tensor_lists, 2)
    norms = multi_tensor_l2norm(chunk_size, noop_flag, [src], per_tensor)
    multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale)
    return norms


def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Adapt a loss scale in place: it backs off from the `hysteresis`-th overflow in a row on.

    Arguments:
        current_scale: float32. growth_tracker, hysteresis_tracker: int32. found_inf: float32,
            positive after an overflow. One element each, on one device.

    Returns:
        `current_scale`.
    """
    with torch.no_grad():
        overflow = (found_inf > 0).reshape(current_scale.shape)
        tracker = hysteresis_tracker - overflow.to(torch.int32)
        backs_off = overflow & (tracker <= 0)
        steps = growth_tracker + 1
        grows = ~overflow & (steps >= growth_interval)
        grown = current_scale * growth_factor
        grown = torch.where(grown.isfinite(), grown, current_scale)
        scale = torch.where(backs_off, current_scale * backoff_factor, current_scale)
        current_scale.copy_(torch.where(grows, grown, scale))
        growth_tracker.copy_(torch.where(overflow | grows, torch.zeros_like(steps), steps))
        hysteresis_tracker.copy_(
            torch.where(overflow, tracker, torch.full_like(tracker, hysteresis))
        )
    return current_scale


def _rows(name: str, lists: TensorLists, depth: int) -> list[list[Tensor]]:
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
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if tensor.is_contiguous():
        return True
    return tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])


def _same_order(a: Tensor, b: Tensor) -> bool:
    """Strides agree wherever a dimension has more than one element."""
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return a.numel() == 0 or all(x == y for size, x, y in strides if size > 1)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _found(noop_flag: Tensor) -> Tensor:
    return torch.zeros((), dtype=torch.float32, device=noop_flag.device)


def _set_flag(noop_flag: Tensor, found: Tensor) -> None:
    seen = (found > 0).to(device=noop_flag.device, dtype=noop_flag.dtype)
    with torch.no_grad():
        torch.maximum(noop_flag, seen.expand_as(noop_flag), out=noop_flag)


def _run(operation: Callable[..., Any], *args: Any) -> Any:
    """`operation`, with amp_C's type of error."""
    try:
        return operation(*args)
    except (TypeError, ValueError) as error:
        raise RuntimeError(str(error)) from error
