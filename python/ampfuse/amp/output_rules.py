"""Operations on model outputs that read and write half data, without FP32 memory.

Each rule takes the operator and its arguments, and returns NotImplemented where it does not apply:
then the operation is computed in FP32 (see float32_output.py).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ampfuse import pytree as trees
from ampfuse.amp.float32_output import Float32Output, Memory, half_data, is_dense
from ampfuse.nn.functional import total_weight
from ampfuse.torch_utils import HALF_DTYPES

aten = torch.ops.aten


def _source_of(tensor: Any) -> Any:
    return tensor.memory.source if isinstance(tensor, Float32Output) else None


# --- values that are picked, compared or moved ----------------------------------------------------

_EXACT = """
    amax.default amin.default argmax.default argmin.default max.default max.dim min.default min.dim
    aminmax.default topk.default sort.default isnan.default isinf.default index.Tensor
    index_select.default gather.default masked_select.default cat.default flip.default
    slice_backward.default select_backward.default
""".split()


def _run_on_half(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op that selects, compares or moves values on half data, where it is exact."""
    floats = [t for t in trees.tensors(args) if t.is_floating_point()]
    dtypes = {None if (data := half_data(t)) is None else data.dtype for t in floats}
    if None in dtypes or len(dtypes) > 1:
        return NotImplemented

    def half(item: Any) -> Any:
        return item.half_data() if isinstance(item, Float32Output) else item

    def widened(result: Any) -> Any:
        if not isinstance(result, Tensor) or result.dtype not in HALF_DTYPES:
            return result
        return Float32Output.of(result) if result.dim() else result.float()

    return pytree.tree_map(widened, func(*pytree.tree_map(half, args), **kwargs))


def _clone(func: Any, tensor: Float32Output, *, memory_format: Any = None) -> Any:
    half = half_data(tensor)
    if half is None:
        return NotImplemented
    if memory_format not in (None, torch.preserve_format) or not is_dense(half):
        half = half.clone(memory_format=memory_format or torch.preserve_format)
    return Float32Output.of(half.detach())  # half data is never written to, so it can be shared


def _new_zeros(func: Any, like: Float32Output, size: Any, *, dtype: Any = None, **_: Any) -> Any:
    """Zeros into which ``index_put`` writes the gradient of picked values."""
    half = half_data(like)
    if half is None or dtype not in (None, torch.float32) or torch.is_grad_enabled():
        return NotImplemented
    zeros = half.new_zeros(size)
    return Float32Output.over(Memory(zeros, source=_ZEROS), zeros, 0)


_ZEROS = object()  # the source of zeros that nothing was written to


def _index_put(func: Any, zeros: Any, *args: Any) -> Any:
    """The gradient of ``y[indices]``; elements picked twice are summed in half precision."""
    if _source_of(zeros) is not _ZEROS:
        return NotImplemented
    return _run_on_half(func, zeros, *args)


def _to_copy(func: Any, tensor: Float32Output, *, dtype: Any = None, **kwargs: Any) -> Any:
    half = half_data(tensor)
    if half is None:
        return NotImplemented
    if dtype not in (None, torch.float32):
        return func(half, dtype=dtype, **kwargs)
    return Float32Output.of(func(half, **kwargs))


# --- cross-entropy, written as log_softmax and nll_loss -------------------------------------------


@dataclasses.dataclass(eq=False)
class _LogSoftmax:
    """The source of a ``log_softmax``: half logits [rows, classes].

    `lse` [rows, 2] is the logarithm of their sums of exponentials, once a loss has computed it.
    """

    rows: Tensor
    lse: Tensor | None = None


@dataclasses.dataclass(eq=False)
class _NllGradient:
    """The source of a gradient of ``log_softmax``: the arguments of its ``nll_loss``."""

    of: _LogSoftmax
    each: Tensor  # the gradient of the loss of each row
    target: Tensor
    weight: Tensor | None
    ignore: int

    @property
    def rows(self) -> Tensor:
        return self.of.rows


def _log_softmax(func: Any, logits: Float32Output, dim: int, half_to_float: bool) -> Any:
    half = half_data(logits)
    if half is None or half.dim() == 0 or dim % half.dim() != half.dim() - 1:
        return NotImplemented
    if not half.is_contiguous() or half.device.type not in ("cpu", "cuda"):
        return NotImplemented
    source = _LogSoftmax(half.view(-1, half.shape[-1]))
    memory = Memory(None, lambda: func(half.float(), dim, False), source)
    return Float32Output.over(memory, half, 0)


def _nll_loss(
    func: Any, log_softmax: Any, target: Tensor, weight: Tensor | None, reduction: int, ignore: int
) -> Any:
    source = _source_of(log_softmax)
    if not isinstance(source, _LogSoftmax) or target.dim() != 1 or log_softmax.dim() != 2:
        return NotImplemented
    if target.dtype != torch.int64:  # torch takes uint8 too
        return NotImplemented
    weight = None if weight is None else weight.contiguous()
    losses, source.lse = torch.ops.ampfuse.cross_entropy_loss(
        source.rows, target.contiguous(), weight, ignore, 0.0
    )
    if reduction == 0:
        return losses, losses.new_zeros(())
    total = total_weight(target, weight, ignore).float()
    return losses.sum() / total if reduction == 1 else losses.sum(), total


def _nll_loss_backward(
    func: Any,
    gradient: Tensor,
    log_softmax: Any,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore: int,
    total: Tensor,
) -> Any:
    source = _source_of(log_softmax)
    if not isinstance(source, _LogSoftmax) or source.lse is None:
        return NotImplemented
    each = (gradient / total if reduction == 1 else gradient).expand(target.shape).contiguous()

    def make() -> Tensor:
        like = torch.empty_like(source.rows, dtype=torch.float32)
        return func(gradient, like, target, weight, reduction, ignore, total)

    contiguous = None if weight is None else weight.contiguous()
    gradient_source = _NllGradient(source, each, target.contiguous(), contiguous, ignore)
    return Float32Output.over(Memory(None, make, gradient_source), source.rows, 0)


def _log_softmax_backward(func: Any, gradient: Any, output: Any, dim: int, dtype: Any) -> Any:
    source = _source_of(gradient)
    if not isinstance(source, _NllGradient) or source.of is not _source_of(output):
        return NotImplemented
    return Float32Output.of(
        torch.ops.ampfuse.cross_entropy_gradient(
            source.each,
            source.rows,
            source.target,
            source.weight,
            source.of.lse,
            source.ignore,
            0.0,
        )
    )


def rules() -> dict[Any, Callable[..., Any]]:
    """The rules by operator."""
    return {
        aten.clone.default: _clone,
        aten.index_put.default: _index_put,
        aten.new_zeros.default: _new_zeros,
        aten._to_copy.default: _to_copy,
        aten._log_softmax.default: _log_softmax,
        aten._log_softmax_backward_data.default: _log_softmax_backward,
        aten.nll_loss_forward.default: _nll_loss,
        aten.nll_loss_backward.default: _nll_loss_backward,
        **{operator.attrgetter(name)(aten): _run_on_half for name in _EXACT},
    }
