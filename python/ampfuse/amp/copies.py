"""``state_dict()`` of a half-precision model holds FP32 copies, and some programs write to them.

Elsewhere in torch the values of a state dict are the weights themselves, and moving averages of a
copied model (EMA) rely on it. So the copy of a model keeps its FP32 values once they were asked
for, as an optimizer keeps masters, and a write to one reaches the half weight at once. With any
other model the values are made anew each time.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ampfuse import trees
from ampfuse.optim.masters import HALF_DTYPES, ModelParameter

# The FP32 values, by name, of each part of a copied model.
_kept: weakref.WeakKeyDictionary[nn.Module, dict[str, KeptCopy]] = weakref.WeakKeyDictionary()


class KeptCopy(Tensor):
    """The FP32 value of a half weight, between two of its rounded values if somebody averages.

    Pickles and deep-copies as a plain tensor; what is computed from it is one.
    """

    weight: Tensor
    published: int  # the version that the weight has followed
    followed: int  # the weight's version then

    @classmethod
    def of(cls, weight: Tensor) -> KeptCopy:
        kept = weight.detach().float().as_subclass(cls)
        with torch._C.DisableTorchFunctionSubclass():
            kept.weight, kept.published, kept.followed = weight, kept._version, weight._version
        return kept

    @torch.no_grad()
    def publish(self) -> None:
        """The weight takes over what was written here."""
        with torch._C.DisableTorchFunctionSubclass():
            if self._version != self.published:
                self.weight.copy_(self)
                self.published, self.followed = self._version, self.weight._version

    @torch.no_grad()
    def load(self, value: Tensor) -> None:
        """Take over `value` where the weight is its rounding."""
        with torch._C.DisableTorchFunctionSubclass():
            self.copy_(value)
            self.published = self._version
            self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """Take over what was written to the weight: elements that it is not the rounding of."""
        self.publish()
        with torch._C.DisableTorchFunctionSubclass():
            edited = self.to(self.weight.dtype) != self.weight
            self.copy_(torch.where(edited, self.weight.float(), self))
            self.published, self.followed = self._version, self.weight._version

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALIASES:  # written to as often as the tensor itself
            return args[0]
        kwargs = kwargs or {}
        kept = [tensor for tensor in trees.tensors((args, kwargs)) if isinstance(tensor, cls)]
        for tensor in kept:
            if tensor.weight._version != tensor.followed:
                tensor.follow()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        for tensor in kept:
            tensor.publish()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


_ALIASES = frozenset({Tensor.data.__get__, Tensor.detach})  # type: ignore[attr-defined]


def keep_from_now_on(model: nn.Module) -> None:
    """`model` is a copy: its FP32 values live with it, from the first ``state_dict()`` on."""
    for module in model.modules():
        _kept[module] = {}


def stop_keeping(model: nn.Module) -> None:
    """An optimizer is going to train `model`."""
    for module in model.modules():
        _kept.pop(module, None)


def float32_entry(module: nn.Module, name: str, entry: Tensor, weight: Tensor | None) -> Tensor:
    """What stands for `entry` of a state dict, the half `weight` called ``module.name``."""
    kept = _kept.get(module)
    if kept is None or weight is None or not _can_keep(entry, weight):
        return entry.float()
    known = kept.get(name)
    if known is None or known.weight is not weight or known.device != weight.device:
        kept[name] = KeptCopy.of(weight)
    else:
        known.follow()
    return kept[name]


def take_over(module: nn.Module, name: str, value: Any, weight: Tensor | None) -> None:
    """`weight` was loaded from `value`: a copied model keeps the digits."""
    kept = _kept.get(module)
    if kept is None or weight is None or not isinstance(value, Tensor):
        return
    if value.shape == weight.shape and value.dtype == torch.float32 and _can_keep(weight, weight):
        kept[name] = KeptCopy.of(weight)
        kept[name].load(value)


def _can_keep(entry: Tensor, weight: Tensor) -> bool:
    is_trained = isinstance(weight, ModelParameter) and weight.living_owner() is not None
    is_weight = entry.data_ptr() == weight.data_ptr() and weight.dtype in HALF_DTYPES
    return is_weight and not (is_trained or torch.is_inference_mode_enabled())
