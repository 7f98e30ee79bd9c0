"""``amp_C``: norms, scaling, optimizer steps and the loss scale of apex's extension, CPU and CUDA.

Every list operation takes ``(chunk_size, noop_flag, tensor_lists, ...)``. The flag is an int32
tensor of one element on the tensors' device; an operation that looks for values that are not finite
sets it to 1 and never clears it. Nothing waits for the device, but for
:func:`multi_tensor_lamb_stage1_cuda`, and the chunk size has no effect. Tensors are float32,
float16 or bfloat16, each by itself (not in the optimizers); those at the same place of the lists
have as many elements and are read in the order of their memory. What does not fit is a
RuntimeError.

Source: the argument orders and flags of NVIDIA apex's ``amp_C`` (BSD-3-Clause).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampfuse import _core, ops
from ampfuse.compat.apex.list_steps import (
    multi_tensor_adagrad,
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_lamb,
    multi_tensor_lamb_mp,
    multi_tensor_lamb_stage1_cuda,
    multi_tensor_lamb_stage2_cuda,
    multi_tensor_novograd,
    multi_tensor_sgd,
)
from ampfuse.compat.apex.tensor_lists import TensorLists, checked, rows, set_flag


def __getattr__(name: str) -> Any:
    raise AttributeError(f"amp_C has no {name!r}; it has {', '.join(__all__)}.")


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float
) -> None:
    """``out = in * scale`` for the lists (in, out). Inputs are checked, not results."""
    src, dst = rows("multi_tensor_scale", tensor_lists, 2)
    found = torch.zeros((), device=noop_flag.device)
    checked(ops.scale, src, dst, float(scale), found)
    set_flag(noop_flag, found)


def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    a: float,
    b: float,
    arg_to_check: int,
) -> None:
    """``out = a * x + b * y`` for the lists (x, y, out); checks -1 both, 0 x, 1 y."""
    x, y, out = rows("multi_tensor_axpby", tensor_lists, 3)
    found = torch.zeros((), device=noop_flag.device)
    checked(ops.axpby, x, y, out, float(a), float(b), found, int(arg_to_check))
    set_flag(noop_flag, found)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """The L2 norm of everything in the one list, and of each tensor.

    Sets the flag if an element is not finite (apex: if a square overflows, too).
    ``multi_tensor_l2norm_mp`` is the same, whatever the flag on entry.

    Returns:
        ``(norm, norms)``: float32, of shapes (1,) and (n,), or (0,) without `per_tensor`.
    """
    (tensors,) = rows("multi_tensor_l2norm", tensor_lists, 1)
    norm, norms = checked(ops.l2norm, tensors, bool(per_tensor))
    set_flag(noop_flag, ~norm.isfinite())
    return norm.reshape(1), norms


multi_tensor_l2norm_mp = multi_tensor_l2norm


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    inv_scale: Tensor,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """:func:`multi_tensor_l2norm` of the tensors times `inv_scale` (float32, one element)."""
    (tensors,) = rows("multi_tensor_unscale_l2norm", tensor_lists, 1)
    factor = inv_scale.detach().to(tensors[0].device, torch.float32)
    norm, norms = checked(_core.C.l2norm, tensors, bool(per_tensor), factor)
    set_flag(noop_flag, ~norm.isfinite())
    return norm.reshape(1), norms


def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    scale: float,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """``out = in * scale`` for the lists (in, out), and the norm of the unscaled `in`."""
    src, _ = rows("multi_tensor_l2norm_scale", tensor_lists, 2)
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
        hysteresis_tracker.copy_(torch.where(overflow, hysteresis_tracker - 1, hysteresis))
        growth_tracker.copy_(torch.where(overflow, 0, growth_tracker + 1))
        grows = growth_tracker >= growth_interval
        backs_off = overflow & (hysteresis_tracker <= 0)
        growth_tracker.masked_fill_(grows, 0)
        factor = torch.where(backs_off, backoff_factor, torch.where(grows, growth_factor, 1.0))
        scale = current_scale * factor
        current_scale.copy_(torch.where(scale.isfinite(), scale, current_scale))
    return current_scale


__all__ = sorted(name for name in globals() if name.startswith(("multi_tensor_", "update_")))
