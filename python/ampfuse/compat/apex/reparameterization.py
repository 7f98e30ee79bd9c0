"""``apex.reparameterization``: weight norm, ``w = g * v / norm(v)``, with v and g as parameters."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn


class WeightNorm:
    """Computes a weight before each ``forward`` of the module that it hangs on."""

    def __init__(self, name: str, dim: int | None, module: nn.Module) -> None:
        self.name, self.dim = name, dim
        owner, attribute = _owner(module, name)
        weight = owner._parameters.pop(attribute)
        assert weight is not None
        v = nn.Parameter(weight.detach())
        owner.register_parameter(f"{attribute}_g", nn.Parameter(self._norm(v.detach())))
        owner.register_parameter(f"{attribute}_v", v)
        # Computed without a graph, so that `copy.deepcopy(module)` works.
        with torch.no_grad():
            self(module)

    def _norm(self, v: Tensor) -> Tensor:
        dims = [d for d in range(v.dim()) if self.dim is None or d != self.dim % v.dim()]
        return torch.linalg.vector_norm(v, 2, dims, keepdim=True, dtype=torch.float32).to(v.dtype)

    def __call__(self, module: nn.Module, inputs: Any = None) -> None:
        owner, name = _owner(module, self.name)
        g, v = getattr(owner, f"{name}_g"), getattr(owner, f"{name}_v")
        setattr(owner, name, v * (g / self._norm(v)))

    def remove(self, module: nn.Module) -> None:
        """Turn the weight back into a plain parameter with its present value."""
        self(module)
        owner, name = _owner(module, self.name)
        weight = getattr(owner, name).detach()
        for each in (name, f"{name}_g", f"{name}_v"):
            delattr(owner, each)
        setattr(owner, name, nn.Parameter(weight))


def apply_weight_norm(
    module: nn.Module, name: str = "", dim: int | None = 0, hook_child: bool = True
) -> nn.Module:
    """Give weights of `module` a direction, ``<name>_v``, and a length, ``<name>_g``; return it.

    `name` is a parameter, or a module in `module`; empty: all but vectors and embeddings. Weights
    that have a weight norm keep it. Entries of dimension `dim` have a length each. Weights are
    computed before the ``forward`` of their own module, or of `module` without `hook_child`.
    """
    for full, param in list(module.named_parameters()):
        owner, attribute = _owner(module, full)
        stays = param.dim() <= 1 or isinstance(owner, (nn.Embedding, nn.EmbeddingBag))
        # Direction and length belong to a weight that is no parameter any more.
        has_norm = isinstance(vars(owner).get(re.sub("_[gv]$", "", attribute)), Tensor)
        if not (stays or has_norm) and (not name or f"{full}.".startswith(f"{name}.")):
            hooked, name_there = (owner, attribute) if hook_child else (module, full)
            hooked.register_forward_pre_hook(WeightNorm(name_there, dim, hooked))
    return module


def remove_weight_norm(module: nn.Module, name: str = "", remove_all: bool = False) -> nn.Module:
    """Make the weight `name` a plain parameter again, or every weight in `module` if no name is
    given. ValueError if `name` has no weight norm."""
    found = False
    for part in [module] if name else module.modules():
        for key, hook in list(part._forward_pre_hooks.items()):
            if isinstance(hook, WeightNorm) and name in ("", hook.name):
                hook.remove(part)
                del part._forward_pre_hooks[key]
                found = True
    if name and not found:
        raise ValueError(f"{module} has no weight norm of {name!r}.")
    return module


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute
