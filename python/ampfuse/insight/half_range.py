"""Weights that float16 has no room for: found before a model is cast, and known afterwards."""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict

import torch
from torch import nn

from ampfuse.amp.casts import eager_module, type_in_model
from ampfuse.amp.policy import Policy
from ampfuse.optim.shards import local

_LIMIT = torch.finfo(torch.float16).max

# The largest magnitude of what a cast made inf, by name, of each module.
_too_large: weakref.WeakKeyDictionary[nn.Module, dict[str, float]] = weakref.WeakKeyDictionary()


def warn_of_range(model: nn.Module, policy: Policy) -> None:
    """Warn if the cast of `model` is going to make inf of a finite weight or buffer."""
    if policy.weights_type is not torch.float16:
        return
    lost = _find(eager_module(model), bool(policy.keep_batchnorm_fp32))
    if lost:
        (name, largest), *others = lost.items()
        more = f" {len(others)} more tensor(s) are beyond it too." if others else ""
        warnings.warn(
            f"{name!r} of the {type(model).__name__} holds values up to {largest:.6g}, and float16 "
            f"ends at {_LIMIT:g}: the cast of {policy.opt_level} makes inf of them.{more} Use O5 "
            "or O4, whose BF16 has FP32's range, or bring the values into range before "
            "amp.initialize.",
            stacklevel=5,
        )


def was_too_large(module: nn.Module, name: str) -> float | None:
    """The largest magnitude of the tensor `name` of `module`, if its cast made inf of it."""
    return _too_large.get(module, {}).get(name)


@torch.no_grad()
def _find(model: nn.Module, keep_batchnorm_fp32: bool) -> dict[str, float]:
    """The largest magnitudes by full name. Waits once for each device."""
    by_device = defaultdict(list)
    for prefix, module in model.named_modules():
        if type_in_model(module, torch.float16, keep_batchnorm_fp32) is not torch.float16:
            continue
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or tensor.is_meta or not tensor.is_floating_point():
                continue
            shard = local(tensor).detach()
            if torch.finfo(shard.dtype).max > _LIMIT and shard.numel() > 0:
                by_device[shard.device].append((prefix, module, name, shard))
    found = {}
    for listed in by_device.values():
        norms = torch._foreach_norm([shard for *_, shard in listed], float("inf"))
        largest = torch.stack([norm.double() for norm in norms])
        lost = largest.isfinite() & largest.half().isinf()
        for i in lost.nonzero().flatten().tolist():
            prefix, module, name, _ = listed[i]
            found[f"{prefix}.{name}" if prefix else name] = float(largest[i])
            _too_large.setdefault(module, {})[name] = float(largest[i])
    return found
