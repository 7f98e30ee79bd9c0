"""What ``amp.initialize`` warns of before it changes anything."""

from __future__ import annotations

import warnings
from collections import Counter

from torch import nn
from torch.optim import Optimizer

from ampfuse.amp.casts import eager_module
from ampfuse.amp.policy import Policy
from ampfuse.insight.half_range import warn_of_range
from ampfuse.optim.inner import parameters, with_inner


def give_hints(models: list[nn.Module], optimizers: list[Optimizer], policy: Policy) -> None:
    """What :func:`ampfuse.amp.initialize` calls before it changes anything."""
    if optimizers:
        _warn_of_strangers(models, optimizers)
    for model in models:
        warn_of_range(model, policy)


def _warn_of_strangers(models: list[nn.Module], optimizers: list[Optimizer]) -> None:
    """Warn of an optimizer that was most likely made for another copy of a model.

    It holds none of the models' parameters, and either no optimizer does, or it holds parameters of
    the same shapes. Others may be of a loss with parameters of its own.
    """
    own = [list(eager_module(model).parameters()) for model in models]
    known = {id(parameter) for listed in own for parameter in listed}
    held = [[p for one in with_inner(each) for p in parameters(one)] for each in optimizers]
    strangers = [known.isdisjoint(map(id, params)) for params in held]
    if not any(parameter.requires_grad for listed in own for parameter in listed):
        return
    shapes = [Counter(parameter.shape for parameter in listed) for listed in own]
    for optimizer, params, is_stranger in zip(optimizers, held, strangers, strict=True):
        alike = Counter(parameter.shape for parameter in parameters(optimizer)) in shapes
        if params and is_stranger and (all(strangers) or alike):
            warnings.warn(
                f"{type(optimizer).__name__} holds no parameter of the model(s) given to "
                "amp.initialize, so it does not train them. Was it made from another copy, before "
                "a copy.deepcopy, a wrapper such as fully_shard, or a change that replaced the "
                "parameters? Make it from model.parameters() just before amp.initialize.",
                stacklevel=5,
            )
