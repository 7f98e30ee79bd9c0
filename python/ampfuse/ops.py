"""Operations on lists of tensors: one pass and one launch, however many tensors there are.

What all of them share:

- A list holds strided tensors on one device, each float32, float16 or bfloat16 on its own; lists of
  one call are equally long and tensors at the same place have the same shape and strides. Tensors
  must be dense, in any order of dimensions (contiguous, ``channels_last``, transposed).
- Arithmetic is FP32, rounded once when a value is stored; `found_inf` flags and norms are float32
  tensors on the lists' device, so no call waits for a GPU.
- `found_inf` (one element) is set to 1 and never cleared, so several calls can share it.
- Autograd records nothing. Versions of written tensors go up, as after any in-place operation.
- TypeError: another dtype, or a sparse tensor. ValueError: lists that do not match, two devices,
  a tensor with gaps or overlapping elements. RuntimeError: a written tensor that requires grad
  outside ``torch.no_grad()``, or CUDA tensors in a build without CUDA. The message names the tensor
  by list and index. Nothing has been written then.

The operations are those of NVIDIA apex's ``amp_C`` (``multi_tensor_scale``, ``multi_tensor_axpby``,
``multi_tensor_l2norm``; BSD-3-Clause), written anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ampfuse import _core

__all__ = ["axpby", "copy", "l2norm", "scale", "unscale"]


def scale(
    src: Sequence[Tensor], dst: Sequence[Tensor], scale: float, found_inf: Tensor | None = None
) -> None:
    """``dst[i] = src[i] * scale``, for every i.

    Arguments:
        src, dst: lists of tensors, any shapes; see the module. They may be the same tensors.
        scale: the factor, rounded to float32.
        found_inf: float32, one element, set to 1 if an element of `src` is inf or NaN.
    """
    _core.C.scale(src, dst, scale, found_inf)


def axpby(
    x: Sequence[Tensor],
    y: Sequence[Tensor],
    out: Sequence[Tensor],
    a: float,
    b: float,
    found_inf: Tensor | None = None,
    check: int = -1,
) -> None:
    """``out[i] = a * x[i] + b * y[i]``, for every i, with a fused multiply-add.

    Arguments:
        x, y, out: lists of tensors, any shapes; see the module. `out` may be `x` or `y`.
        a, b: factors, rounded to float32.
        found_inf: float32, one element, set to 1 if a checked element is inf or NaN.
        check: what is checked: -1 both `x` and `y`, 0 only `x`, 1 only `y`.
    """
    _core.C.axpby(x, y, out, a, b, found_inf, check)


def copy(src: Sequence[Tensor], dst: Sequence[Tensor]) -> None:
    """``dst[i] = src[i]``, cast to the dtype of ``dst[i]`` (round to nearest even), for every i."""
    _core.C.scale(src, dst, 1.0)


def unscale(
    grads: Sequence[Tensor],
    out: Sequence[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor | None = None,
) -> None:
    """``out[i] = grads[i] * inv_scale``, for every i: gradients without their loss scale.

    Write half gradients to FP32 tensors: rounded back to half, small ones become zero.

    Arguments:
        grads, out: lists of tensors, any shapes; see the module. They may be the same tensors.
        inv_scale: float32, one element, on the tensors' device: 1 / loss scale.
        found_inf: float32, one element, set to 1 if an unscaled gradient is inf or NaN.
    """
    _core.C.unscale(grads, out, inv_scale, found_inf)


def l2norm(tensors: Sequence[Tensor], per_tensor: bool = False) -> tuple[Tensor, Tensor]:
    """The L2 norm over all elements of all tensors, and of each tensor.

    It neither overflows nor underflows where its value is a float32: squares are added in FP32 and
    in double, rescaled where needed (as BLAS's ``nrm2``). The same values give the same bits on
    every device, instruction set and number of threads.

    Arguments:
        tensors: any shapes; see the module.
        per_tensor: also compute the norm of each tensor.

    Returns:
        ``(norm, norms)``: float32 tensors on the tensors' device, 0-dim and of shape
        ``(len(tensors),)``, or ``(0,)`` without `per_tensor`. Infinite values give inf, NaNs NaN.
    """
    return _core.C.l2norm(tensors, per_tensor)
