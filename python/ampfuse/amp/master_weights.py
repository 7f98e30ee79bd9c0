"""``amp.load_master_weights``: masters from an FP32 checkpoint, when the model came in half."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampfuse.amp import session as sessions
from ampfuse.amp.casts import eager_module
from ampfuse.optim.base import amp_optimizers
from ampfuse.optim.inner import parameters
from ampfuse.optim.masters import MASTERS, MasterParameter


@torch.no_grad()
def load_master_weights(
    optimizer: Optimizer, state_dict: Mapping[str, Any], model: nn.Module | None = None
) -> None:
    """Load a model's checkpoint, with every digit of it in the FP32 masters of `optimizer`.

    As ``model.load_state_dict(state_dict)``, after which a half weight is the checkpoint's value
    rounded; and its master is that value, not the rounded one. What has no master (FP32 batch
    norms, frozen weights, buffers) gets its value cast. Moments and step counts stay.

    Arguments:
        optimizer: one that went through ``amp.initialize``, or of ampfuse with
            ``master_weights=True``.
        state_dict: what ``model.state_dict()`` gave in FP32.
        model: whose state this is. Needed for an optimizer alone, and after an ``initialize`` of
            several models.

    Raises:
        TypeError: an optimizer without masters of ampfuse.
        ValueError: it is not clear which model is meant.
        RuntimeError: missing or unexpected keys, or other shapes. Nothing has changed then.
    """
    owners = amp_optimizers(optimizer)
    if not owners:
        raise TypeError(
            f"A {type(optimizer).__name__} keeps no FP32 masters: pass it through amp.initialize, "
            "or use one of ampfuse.optim with master_weights=True."
        )
    owner = owners[-1]
    if model is None:
        known = sessions.models_of(optimizer)
        if len(known) != 1:
            raise ValueError(
                f"This optimizer went through amp.initialize with {len(known)} models: pass the "
                "one that the state belongs to, as model=."
            )
        model = known[0]
    model = eager_module(model)
    _check(model, state_dict)
    owner.follow_edits()  # of other weights, before all that there are now are accepted
    model.load_state_dict(state_dict)
    owner.param_table()  # with which an optimizer alone makes its masters
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for param in parameters(owner):
        weight = param.model_param if isinstance(param, MasterParameter) else param
        if weight is param and not MASTERS & owner.state.get(param, {}).keys():
            continue
        if id(weight) in names:
            exact = state_dict[names[id(weight)]].detach().to(param.device, torch.float32)
            owner.restore_master(param, {}, exact)


def _check(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    own = model.state_dict(keep_vars=True)
    wrong = {
        "missing": [key for key in own if key not in state_dict],
        "unexpected": [key for key in state_dict if key not in own],
        "of another shape": [
            f"{key} ({tuple(state_dict[key].shape)}, not {tuple(value.shape)})"
            for key, value in own.items()
            if isinstance(value, Tensor)
            and key in state_dict
            and state_dict[key].shape != value.shape
        ],
    }
    said = [
        f"{what}: {', '.join(keys[:4])}" + f" and {len(keys) - 4} more" * (len(keys) > 4)
        for what, keys in wrong.items()
        if keys
    ]
    if said:
        raise RuntimeError(
            f"This is no state of the {type(model).__name__}. It has keys {'; '.join(said)}. "
            "Nothing was loaded."
        )
