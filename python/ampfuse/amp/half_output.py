"""Half-precision outputs whose losses compute in FP32 (levels O1 and O4).

Under autocast a model returns half tensors, and the loss is computed outside ``forward``, where
autocast is off. In half precision it would be wrong without an error: a scaled gradient of 65536
does not fit FP16, and a mean over many elements keeps three digits. apex replaced the loss
functions of ``torch`` for the whole process. Leaving autocast on after ``forward`` would change
whatever else the process does. Here the *data* carries the rule: the output is the half tensor that
autocast made, of a subclass that computes losses, norms, sums and the like in FP32, wherever the
function was imported from. What is still half after another operation (``view``, ``[mask]``,
``* 2``) carries the rule on; an FP32 result is a plain tensor. Models that are not under amp, other
threads and ``torch``'s own functions are not touched.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import get_default_nowrap_functions

from ampfuse.amp import trees
from ampfuse.amp.cast_log import LogCastsFor
from ampfuse.amp.op_rules import OpRules, name_of
from ampfuse.optim.masters import HALF_DTYPES

# By name, so that the function, the Tensor method and the operator are one entry. These are the
# operations that apex's O1 ran in FP32, with `mean` and the losses that torch has got since. CPU
# autocast has a shorter list of its own; this one holds on every device.
_LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy
    ctc_loss gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss
    mse_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss nll_loss
    poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
    triplet_margin_with_distance_loss
"""
_REDUCTIONS_AND_DISTANCES = """
    cdist cosine_similarity cumprod cumsum dist logcumsumexp logsumexp mean nansum norm normalize
    matrix_norm nuclear_norm pairwise_distance pdist prod renorm std std_mean sum trace var
    var_mean vector_norm
"""
_LEAVE_THE_RANGE_OF_HALF = """
    __pow__ __rpow__ acos asin cosh erfinv exp expm1 log log10 log1p log2 log_softmax logsigmoid
    pow reciprocal rsqrt sinh softmax softmin softplus square tan
"""
FP32_FUNCTIONS = frozenset((_LOSSES + _REDUCTIONS_AND_DISTANCES + _LEAVE_THE_RANGE_OF_HALF).split())

_thread = threading.local()


def casts_are_disabled() -> bool:
    """True in this thread inside :func:`disable_casts`."""
    return getattr(_thread, "disabled", 0) > 0


@contextlib.contextmanager
def disable_casts() -> Iterator[None]:
    """Compute as written inside the block: no cast of O1 or O4 happens in it, in this thread.

    Turns autocast off and stops half outputs from computing their losses in FP32. What was before
    is there again afterwards, also when the block raises, and blocks may be nested. Half tensors
    from outside stay half; cast them (``x.float()``) where FP32 is wanted.
    """
    _thread.disabled = getattr(_thread, "disabled", 0) + 1
    try:
        with contextlib.ExitStack() as stack:
            for device_type in {"cpu", _accelerator()}:
                stack.enter_context(torch.autocast(device_type, enabled=False))
            yield
    finally:
        _thread.disabled -= 1


def _accelerator() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


class HalfOutput(Tensor):
    """A float16 or bfloat16 tensor whose losses, sums and norms are computed in FP32.

    Made by the models of levels O1 and O4, by :func:`wrap`. Pickles and deep-copies as a plain
    tensor.

    Attributes:
        rules: of a subclass for models that follow rules of their own instead of autocast's.
        logs_casts: of a subclass for models whose casts are logged.
    """

    rules: OpRules | None = None
    logs_casts = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            if casts_are_disabled() or name in _AUTOGRAD:
                return func(*args, **kwargs)
            with LogCastsFor(name) if cls.logs_casts else contextlib.nullcontext():
                return cls._compute(name, func, args, kwargs)

    @classmethod
    def _compute(cls, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if cls.rules is not None:
            dtype = next(t.dtype for t in trees.tensors((args, kwargs)) if isinstance(t, cls))
            args, kwargs = cls.rules.apply(name, dtype, args, kwargs)
        elif name in FP32_FUNCTIONS:
            args = trees.replace(args, _to_float32)
            kwargs = {
                key: value if key == "out" else trees.replace(value, _to_float32)
                for key, value in kwargs.items()
            }
            return func(*args, **kwargs)
        with _autocast_if_mixed(args, kwargs):
            result = func(*args, **kwargs)
        if func in get_default_nowrap_functions() or name in _PLAIN:
            return result
        return wrap(result, cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


# A backward pass started from here must not run under autocast.
_AUTOGRAD = frozenset({"backward", "grad"})
# Functions whose caller asked for a tensor of another class, or for the bare memory.
_PLAIN = frozenset({"as_subclass", "__array__", "numpy"})


def wrap(value: Any, kind: type[HalfOutput] = HalfOutput) -> Any:
    """`value` with the plain half tensors in it turned into `kind` (same memory)."""

    def leaf(item: Any) -> Any:
        if type(item) is Tensor and item.dtype in HALF_DTYPES:
            return item.as_subclass(kind)
        return item

    return trees.replace(value, leaf)


@functools.cache
def half_output_class(rules: OpRules | None, logs_casts: bool) -> type[HalfOutput]:
    """The class of outputs that follow `rules` outside the model too; None: FP32_FUNCTIONS."""
    if rules is None and not logs_casts:
        return HalfOutput
    return type("HalfOutput", (HalfOutput,), {"rules": rules, "logs_casts": logs_casts})


def unwrap(value: Any) -> Any:
    """`value` with every :class:`HalfOutput` in it turned into a plain tensor (same memory)."""
    return trees.replace(value, _plain)


def _plain(item: Any) -> Any:
    if isinstance(item, HalfOutput):
        with torch._C.DisableTorchFunctionSubclass():
            return item.as_subclass(Tensor)
    return item


def _to_float32(item: Any) -> Any:
    if isinstance(item, Tensor) and item.dtype in HALF_DTYPES:
        return item.float()
    return item


def _autocast_if_mixed(args: Any, kwargs: Any) -> contextlib.AbstractContextManager[Any]:
    """Autocast, if a half output meets FP32 tensors, as in a layer applied outside the model.

    Autocast then does what it would have done inside: casts for a product, promotes for ``cat``.
    """
    half = None
    mixed = False
    for tensor in trees.tensors((args, kwargs)):
        if isinstance(tensor, HalfOutput):
            half = tensor
        elif tensor.dtype == torch.float32:
            mixed = True
    if half is None or not mixed:
        return contextlib.nullcontext()
    return torch.autocast(half.device.type, dtype=half.dtype, cache_enabled=False)
