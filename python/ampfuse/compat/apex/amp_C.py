"""``amp_C``: norms, scaling, optimizer steps and the loss scale of apex's extension, CPU and CUDA.

Every list operation takes ``(chunk_size, noop_flag, tensor_lists, ...)``. The flag is an int32
tensor of one element on the tensors' device; an operation that looks for values that are not finite
sets it to 1 and never clears it. The chunk size has no effect. Each tensor may be float32, float16
or bfloat16, whatever the others are; the optimizers are stricter. Norms, scale and axpby also take
integers, and truncate as torch does. Tensors at the same place of the lists have as many elements
and are read in the order of their memory. What does not fit raises RuntimeError.

Source: the argument orders and flags of NVIDIA apex's ``amp_C`` (BSD-3-Clause).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampfuse import _core, ops

# isort: off
# fmt: off
from ampfuse.compat.apex.optimizer_ops import (
    multi_tensor_adagrad, multi_tensor_adam, multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master, multi_tensor_lamb, multi_tensor_lamb_mp,
    multi_tensor_lamb_stage1_cuda, multi_tensor_lamb_stage2_cuda, multi_tensor_novograd,
    multi_tensor_sgd,
)
from ampfuse.compat.apex.multi_tensor_apply import (
    TensorLists, checked, rows, set_flag, without_integers,
)

__all__ = [
    "multi_tensor_adagrad", "multi_tensor_adam", "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master", "multi_tensor_axpby", "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp", "multi_tensor_l2norm_scale", "multi_tensor_lamb",
    "multi_tensor_lamb_mp", "multi_tensor_lamb_stage1_cuda", "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_novograd", "multi_tensor_scale", "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm", "update_scale_hysteresis",
]
# fmt: on
# isort: on


def __getattr__(name: str) -> Any:
    raise AttributeError(f"amp_C has no {name!r}; it has {', '.join(__all__)}.")


def multi_tensor_scale(_: int, flag: Tensor, lists: TensorLists, scale: float) -> None:
    """``out = in * scale`` for the lists (in, out). Inputs are checked, not results."""
    src, dst = rows("multi_tensor_scale", lists, 2)
    src, dst = without_integers(lambda x, out: out.copy_(x * scale), src, dst)
    overflow = torch.zeros((), device=flag.device)
    checked(ops.scale, src, dst, float(scale), overflow)
    set_flag(flag, overflow)


def multi_tensor_axpby(
    _: int, flag: Tensor, lists: TensorLists, a: float, b: float, arg_to_check: int
) -> None:
    """``out = a * x + b * y`` for the lists (x, y, out); checks -1 both, 0 x, 1 y."""
    x, y, out = rows("multi_tensor_axpby", lists, 3)
    x, y, out = without_integers(lambda x, y, out: out.copy_(a * x + b * y), x, y, out)
    overflow = torch.zeros((), device=flag.device)
    checked(ops.axpby, x, y, out, float(a), float(b), overflow, int(arg_to_check))
    set_flag(flag, overflow)


def _l2norm(
    name: str, flag: Tensor, lists: TensorLists, per_tensor: bool | None, inv_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    (tensors,) = rows(name, lists, 1)
    tensors = [t if t.is_floating_point() else t.float() for t in tensors]
    if inv_scale is not None:
        inv_scale = inv_scale.detach().to(tensors[0].device, torch.float32)
    norm, norms = checked(_core.C.l2norm, tensors, bool(per_tensor), inv_scale)
    set_flag(flag, ~norm.isfinite())
    return norm.reshape(1), norms


def multi_tensor_l2norm(
    _: int, flag: Tensor, lists: TensorLists, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """The L2 norm of everything in the one list, and of each tensor.

    Float32, of shapes (1,) and (n,), or (0,) without `per_tensor`. Sets the flag if an element is
    not finite (apex: if a square overflows, too). ``multi_tensor_l2norm_mp`` is the same, whatever
    the flag on entry.
    """
    return _l2norm("multi_tensor_l2norm", flag, lists, per_tensor, None)


multi_tensor_l2norm_mp = multi_tensor_l2norm


def multi_tensor_unscale_l2norm(
    _: int, flag: Tensor, lists: TensorLists, inv_scale: Tensor, per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    """:func:`multi_tensor_l2norm` of the tensors times `inv_scale` (float32, one element)."""
    return _l2norm("multi_tensor_unscale_l2norm", flag, lists, per_tensor, inv_scale)


def multi_tensor_l2norm_scale(
    chunk_size: int, flag: Tensor, lists: TensorLists, scale: float,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``out = in * scale`` for the lists (in, out), and the norm of the unscaled `in`."""
    src, _dst = rows("multi_tensor_l2norm_scale", lists, 2)
    norms = multi_tensor_l2norm(chunk_size, flag, [src], per_tensor)
    multi_tensor_scale(chunk_size, flag, lists, scale)
    return norms


@torch.no_grad()
def update_scale_hysteresis(
    scale: Tensor, growth_tracker: Tensor, hysteresis_tracker: Tensor, found_inf: Tensor, *rule: Any
) -> Tensor:
    """Adapt `scale` in place, by (growth_factor, backoff_factor, growth_interval, hysteresis).

    It backs off from the `hysteresis`-th overflow in a row on. Scale and `found_inf` (positive
    after an overflow) are float32, trackers int32, of one element each and on one device.
    """
    growth_factor, backoff_factor, growth_interval, hysteresis = rule
    overflow = (found_inf > 0).reshape(scale.shape)
    hysteresis_tracker.copy_(torch.where(overflow, hysteresis_tracker - 1, hysteresis))
    growth_tracker.copy_(torch.where(overflow, 0, growth_tracker + 1))
    grows = growth_tracker >= growth_interval
    backs_off = overflow & (hysteresis_tracker <= 0)
    growth_tracker.masked_fill_(grows, 0)
    factor = torch.where(backs_off, backoff_factor, torch.where(grows, growth_factor, 1.0))
    return scale.copy_(torch.where((scale * factor).isfinite(), scale * factor, scale))
