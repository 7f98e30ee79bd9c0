"""What a fused ``forward`` calls in place of a batch norm and of what follows it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import _has_any_global_hook

from ampfuse.nn.batch_norm import normalize

Forward = TypeVar("Forward", bound=Callable[..., Any])


def is_known(norm: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether :func:`norm_act` has a fused form of `norm`, for images.

    A class that overrides ``forward`` does something else.
    """
    return isinstance(norm, nn.BatchNorm2d) and type(norm).forward is _BatchNorm.forward


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
    modules = (norm, *between) if isinstance(act, bool) else (norm, *between, act)
    if (
        is_known(norm)
        and x.dim() == 4
        and (residual is None or (residual.shape == x.shape and residual.dtype == x.dtype))
        and all(type(module) is nn.Identity for module in between)
        and (isinstance(act, bool) or type(act) is nn.ReLU)
        and are_bare(modules)
    ):
        return normalize(norm, x, residual, act is not False)
    out = norm(x)
    for module in between:
        out = module(out)
    if residual is not None:
        out = operator.iadd(out, residual) if in_place else out + residual
    if isinstance(act, bool):
        return F.relu(out) if act else out
    return act(out)


def are_bare(modules: Sequence[nn.Module]) -> bool:
    """Whether calling each is calling its class's ``forward`` or a fused one, without hooks."""
    return not _has_any_global_hook() and not any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or ("forward" in module.__dict__ and not is_fused(module.__dict__["forward"]))
        for module in modules
    )


def mark_fused(forward: Forward) -> Forward:
    """`forward`, known to :func:`is_fused` when it is bound."""
    forward.is_fused = True  # type: ignore[attr-defined]
    return forward


def is_fused(method: Any) -> bool:
    """Whether this is a ``forward`` that fusing put on an instance."""
    return hasattr(getattr(method, "__func__", None), "is_fused")
