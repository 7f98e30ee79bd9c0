"""One module for each framework, which only users of that framework import.

=========================  =============================
``lightning``, ``fabric``  precision plugins
``accelerate``             levels for an ``Accelerator``
``transformers``           levels for a ``Trainer``
``timm``                   the optimizers by name
=========================  =============================

``pip install 'ampfuse[integrations]'`` installs the versions that these are tested with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from ampfuse.amp import session as sessions
from ampfuse.optim.masters import leaf_of
from ampfuse.optim.param_groups import parameters


def beside(new: Sequence[Any], earlier: Sequence[Any]) -> list[Any]:
    """The optimizers of `earlier` that share no weight of a model with those of `new`."""
    trained = {weight for each in new for weight in _weights(each)}
    return [each for each in earlier if not trained & _weights(each)]


def join(new: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """`others`, and those of `new`, which share the loss scalers of `others` from now on: so one
    state has the scale of all."""
    if others:
        session = others[0]._amp_session
        for optimizer in new:
            optimizer._amp_session = session
        sessions.set_latest(session)
    return [*others, *new]


def _weights(optimizer: Any) -> set[int]:
    """The ids of the model's weights that `optimizer` trains."""
    is_one = isinstance(optimizer, Optimizer)  # else amp.initialize says what it takes
    return {id(leaf_of(each)) for each in parameters(optimizer)} if is_one else set()
