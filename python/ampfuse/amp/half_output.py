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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.overrides import get_default_nowrap_functions

from ampfuse import trees
from ampfuse.amp.autocast_rules import AUTOCAST
from ampfuse.amp.cast_state import casts_are_disabled
from ampfuse.amp.op_rules import RNN_LAYERS, OpRules, name_of
from ampfuse.nn.cross_entropy import cross_entropy
from ampfuse.optim.masters import HALF_DTYPES


class HalfOutput(Tensor):
    """A float16 or bfloat16 tensor whose losses, sums and norms are computed in FP32.

    Made by the models of levels O1 and O4, by :func:`wrap`. Pickles and deep-copies as a plain
    tensor.

    Attributes:
        rules: of a subclass for models that follow rules of their own instead of autocast's.
    """

    rules: OpRules = AUTOCAST

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        with torch._C.DisableTorchFunctionSubclass():
            if casts_are_disabled() or name in _AUTOGRAD:
                return func(*args, **kwargs)
            if func is F.cross_entropy:
                return cross_entropy(*unwrap(args), **unwrap(kwargs))
            rule = cls.rules.table.get(name)
            halves = [t for t in trees.tensors((args, kwargs)) if isinstance(t, cls)]
            if rule is not None:
                args, kwargs = rule(halves[0].dtype, args, kwargs)
            # Layers of several operations have no rule; of cuDNN's autocast casts the weights.
            ruled = rule is not None and name not in RNN_LAYERS
            cast: Any = contextlib.nullcontext()
            tensors = () if ruled else trees.tensors((args, kwargs))
            if halves and any(tensor.dtype == torch.float32 for tensor in tensors):
                device, dtype = halves[0].device.type, halves[0].dtype
                cast = torch.autocast(device, dtype=dtype, cache_enabled=False)
            with cast:
                if is_dynamo_compiling():  # it follows torch's Python code only on plain tensors
                    args, kwargs = unwrap(args), unwrap(kwargs)
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


def half_output_class(rules: OpRules | None) -> type[HalfOutput]:
    """The class of outputs that follow `rules` outside the model too; None: AUTOCAST's."""
    if torch.compiler.is_compiling() or rules is None:
        return HalfOutput
    return _class_of(rules)


@functools.cache
def _class_of(rules: OpRules) -> type[HalfOutput]:
    return type("HalfOutput", (HalfOutput,), {"rules": rules})


def unwrap(value: Any) -> Any:
    """`value` with every :class:`HalfOutput` in it turned into a plain tensor (same memory)."""
    return trees.replace(value, _plain)


def _plain(item: Any) -> Any:
    if isinstance(item, HalfOutput):
        with torch._C.DisableTorchFunctionSubclass():
            return item.view_as(item)  # what `as_subclass` does, and Dynamo knows this one
    return item
