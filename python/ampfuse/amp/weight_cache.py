"""Low-precision copies of FP32 weights, made once per iteration.

A weight used several times is cast once, and its gradient flows through one cast. Unlike autocast's
cache this one survives nothing: an entry counts only while the weight is the same memory at the
same version, and copies made without autograd are not kept at all.
"""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

# A weight, its version and memory when it was cast, and the copy.
_Entry = tuple[weakref.ref[Tensor], int, int, Tensor]


class _Thread(threading.local):
    enabled = True

    def __init__(self) -> None:
        self.entries: dict[int, _Entry] = {}  # by id of the weight


_thread = _Thread()


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, from the cache if `tensor` is a weight that was cast before."""
    is_weight = isinstance(tensor, torch.nn.Parameter) and tensor.dtype is torch.float32
    if not (is_weight and tensor.requires_grad and tensor.is_leaf and _thread.enabled):
        return tensor.to(dtype)
    if torch.compiler.is_dynamo_compiling():
        return tensor.to(dtype)
    key, version, memory = id(tensor), tensor._version, tensor.data_ptr()
    entry = _thread.entries.get(key)
    if entry is not None:
        weight, of_version, of_memory, copy = entry
        same = weight() is tensor and version == of_version and memory == of_memory
        if same and copy.dtype is dtype:
            return copy if torch.is_grad_enabled() else copy.detach()
    copy = tensor.to(dtype)
    if copy.requires_grad:
        _thread.entries[key] = (weakref.ref(tensor), version, memory, copy)
    return copy


def set_enabled(enabled: bool) -> None:
    """Whether this thread keeps copies at all."""
    _thread.enabled = enabled


def clear() -> None:
    """Forget this thread's copies."""
    _thread.entries.clear()


def copies() -> dict[Tensor, Tensor]:
    """The copies that this thread holds, by weight."""
    held = ((weight(), copy) for weight, _, _, copy in _thread.entries.values())
    return {weight: copy for weight, copy in held if weight is not None}


def remove(tensor: Tensor) -> None:
    """Forget the copy of the weight `tensor`."""
    _thread.entries.pop(id(tensor), None)
