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
from torch.utils.weak import WeakIdKeyDictionary

from ampfuse import trees
from ampfuse.optim.masters import HALF_DTYPES, ModelParameter
from ampfuse.optim.shards import is_sharded

# The parts of copied models, and the FP32 values of their weights.
_copied: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_kept = WeakIdKeyDictionary()


class KeptCopy(Tensor):
    """The FP32 value of a half weight, between two of its rounded values if somebody averages.

    Pickles and deep-copies as a plain tensor; what is computed from it is one.
    """

    weight: weakref.ref[Tensor]
    versions: tuple[int, int]  # of this and of the weight, when they were the same

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor, value: Tensor) -> KeptCopy:
        """`value`, where the weight is its rounding."""
        kept = torch.empty_like(weight, dtype=torch.float32, requires_grad=False).copy_(value)
        kept = kept.as_subclass(cls)
        with torch._C.DisableTorchFunctionSubclass():
            kept.weight, kept.versions = weakref.ref(weight), (kept._version, weight._version)
        kept.follow()
        return kept

    @torch.no_grad()
    def follow(self) -> None:
        """Take over what was written to the weight, unless it has to take over what is here."""
        weight = self.weight()
        if weight is None:
            return
        with torch._C.DisableTorchFunctionSubclass():
            if self._version != self.versions[0]:
                weight.copy_(self)
            else:
                edited = self.to(weight.dtype) != weight
                self.copy_(torch.where(edited, weight.float(), self))
            self.versions = self._version, weight._version

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALIASES:  # written to as often as the tensor itself
            return args[0]
        kwargs = kwargs or {}
        kept = [tensor for tensor in trees.tensors((args, kwargs)) if isinstance(tensor, cls)]
        _follow_changes(kept)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        _follow_changes(kept)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


_ALIASES = frozenset({Tensor.data.__get__, Tensor.detach})  # type: ignore[attr-defined]


def _follow_changes(copies: list[KeptCopy]) -> None:
    for kept in copies:
        weight = kept.weight()
        with torch._C.DisableTorchFunctionSubclass():
            changed = weight is not None and kept.versions != (kept._version, weight._version)
        if changed:
            kept.follow()


def keep_from_now_on(model: nn.Module) -> None:
    """`model` is a copy: its FP32 values live with it, from the first ``state_dict()`` on."""
    _copied.update(model.modules())


def stop_keeping(model: nn.Module) -> None:
    """An optimizer is going to train `model`."""
    _copied.difference_update(model.modules())
    for weight in (*model.parameters(), *model.buffers()):
        _kept.pop(weight, None)


def float32_entry(module: nn.Module, entry: Tensor, weight: Tensor) -> Tensor:
    """What stands for `entry` of a state dict, a half `weight` of `module`."""
    if module not in _copied or not _can_keep(entry, weight):
        return entry.float()
    kept: KeptCopy | None = _kept.get(weight)
    if kept is None or kept.device != weight.device:
        kept = _kept[weight] = KeptCopy.of(weight, entry)
    else:
        kept.follow()
    return kept


def take_over(module: nn.Module, weight: Tensor, value: Any) -> None:
    """A `weight` of `module` was loaded from `value`: a copied model keeps the digits."""
    if module not in _copied or not isinstance(value, Tensor):
        return
    if value.shape == weight.shape and value.dtype == torch.float32 and _can_keep(weight, weight):
        _kept[weight] = KeptCopy.of(weight, value)


def _can_keep(entry: Tensor, weight: Tensor) -> bool:
    if is_sharded(weight) or torch.is_inference_mode_enabled():
        return False  # torch exchanges shards, which a weak reference to one forbids
    is_trained = isinstance(weight, ModelParameter) and weight.living_owner() is not None
    is_weight = entry.data_ptr() == weight.data_ptr() and weight.dtype in HALF_DTYPES
    return is_weight and not is_trained
