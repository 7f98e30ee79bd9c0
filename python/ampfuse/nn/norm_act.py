"""What a fused ``forward`` calls in place of a batch norm and of what follows it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import _has_any_global_hook

from ampfuse.nn.batch_norm import normalize
from ampfuse.nn.sync_batch_norm import sync_normalize

# By the forward that a class has or inherits. One that is overridden does something else.
_NORMALIZE: dict[Any, Callable[..., Tensor]] = {
    _BatchNorm.forward: normalize,
    nn.SyncBatchNorm.forward: sync_normalize,
}


def is_known(norm: nn.Module) -> bool:
    """Whether :func:`norm_act` has a fused form of `norm`, for images."""
    images = isinstance(norm, (nn.BatchNorm2d, nn.SyncBatchNorm))
    return images and type(norm).forward in _NORMALIZE


def norm_act(
    norm: nn.Module,
    x: Tensor,
    residual: Tensor | None = None,
    act: nn.Module | bool = False,
    between: Sequence[nn.Module] = (),
    in_place: bool = False,
) -> Tensor:
    """``act(between(norm(x)) + residual)``, fused if the modules are now what they seemed to be.

    They may have been exchanged, or have got hooks; then they are called one by one.

    Arguments:
        act: an ``nn.ReLU``; True for a ReLU that is no module, False for none.
        between: ``nn.Identity`` modules.
        in_place: the residual is added in place, which decides the type of the sum.
    """
    run = _NORMALIZE.get(type(norm).forward)
    modules = (norm, *between) if isinstance(act, bool) else (norm, *between, act)
    if (
        run is not None
        and x.dim() == 4
        and (residual is None or (residual.shape == x.shape and residual.dtype == x.dtype))
        and all(type(module) is nn.Identity for module in between)
        and (isinstance(act, bool) or type(act) is nn.ReLU)
        and are_bare(modules)
    ):
        return run(norm, x, residual, act is not False)
    out = norm(x)
    for module in between:
        out = module(out)
    if residual is not None:
        out = operator.iadd(out, residual) if in_place else out + residual
    if isinstance(act, bool):
        return F.relu(out) if act else out
    return act(out)


def are_bare(modules: Sequence[nn.Module]) -> bool:
    """Whether calling each is calling its class's ``forward``, with no hooks around."""
    return not _has_any_global_hook() and not any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
        for module in modules
    )


def fork(x: Any, n: int) -> Sequence[Any]:
    """`x` for each of `n` users that only read it.

    Their gradients are added inside the backward pass of the batch norm that made `x`.
    """
    # What is compiled has its own way to add them.
    if torch.compiler.is_compiling() or not (isinstance(x, Tensor) and x.requires_grad):
        return [x] * n
    return torch.ops.ampfuse.fork(x, n)
