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

_thread = threading.local()


def _entries() -> dict[tuple[int, torch.dtype], tuple[weakref.ref[Tensor], int, int, Tensor]]:
    if not hasattr(_thread, "entries"):
        _thread.entries = {}
    return _thread.entries


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, from the cache if `tensor` is a weight that was cast before."""
    if not (_is_cached_kind(tensor) and getattr(_thread, "enabled", True)):
        return tensor.to(dtype)
    entries, key = _entries(), (id(tensor), dtype)
    if key in entries:
        weight, version, memory, copy = entries[key]
        same = weight() is tensor and version == tensor._version and memory == tensor.data_ptr()
        if same and tensor.requires_grad:
            return copy if torch.is_grad_enabled() else copy.detach()
        del entries[key]
    copy = tensor.to(dtype)
    if copy.requires_grad:
        entries[key] = (weakref.ref(tensor), tensor._version, tensor.data_ptr(), copy)
    return copy


def _is_cached_kind(tensor: Tensor) -> bool:
    return (
        isinstance(tensor, torch.nn.Parameter)
        and tensor.dtype == torch.float32
        and tensor.is_leaf
        and not torch.compiler.is_compiling()
    )


def set_enabled(enabled: bool) -> None:
    """Whether this thread keeps copies at all."""
    _thread.enabled = enabled


def clear() -> None:
    """Forget this thread's copies."""
    _entries().clear()


def copies() -> dict[Tensor, Tensor]:
    """The copies that this thread holds, by weight."""
    held = ((weight(), copy) for weight, _, _, copy in _entries().values())
    return {weight: copy for weight, copy in held if weight is not None}


def remove(tensor: Tensor) -> None:
    """Forget the copies of the weight `tensor`."""
    for key in [key for key in _entries() if key[0] == id(tensor)]:
        del _entries()[key]
