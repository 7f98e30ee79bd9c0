"""What torch's ``load_state_dict`` would change in a state: the types of its tensors.

torch casts each tensor to the type of its parameter. That rounds FP32 state of a half parameter,
makes numbers of masks, and no state that keeps a type of its own survives. Here a tensor comes back
as it was saved, unless it had its parameter's type and the parameter has got a wider one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ampfuse.optim.masters import HALF_DTYPES

# Beside "state" in a state dict: for each parameter with state of another type, by its index, the
# type that the parameter had.
DTYPES = "param_dtypes"


def uncast(saved: Any, loaded: Any, param: Tensor, was: torch.dtype | None) -> Any:
    """`loaded`, which torch made of the state `saved`, without the casts that lose something.

    Arguments:
        was: the type of the parameter when its state was saved, if known.
    """
    if isinstance(saved, Tensor):
        keep = (
            not saved.is_floating_point()
            or (was is not None and saved.dtype != was)
            or (saved.dtype == torch.float32 and param.dtype in HALF_DTYPES)
        )
        return saved.detach().to(param.device, copy=True) if keep else loaded
    if isinstance(saved, dict):
        return {key: uncast(value, loaded[key], param, was) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        pairs = zip(saved, loaded, strict=True)
        return type(saved)(uncast(before, after, param, was) for before, after in pairs)
    return loaded


def own_dtypes(params: Iterator[Tensor], states: dict[Any, Any]) -> dict[int, torch.dtype]:
    """What stands under `DTYPES`."""
    return {
        i: param.dtype
        for i, param in enumerate(params)
        if any(tensor.dtype != param.dtype for tensor in _floating(states.get(i)))
    }


def _floating(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _floating(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in ("step", "master_param"):
                yield from _floating(item)


def without_masters(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[int, Tensor]]:
    """A state dict without its ``master_param`` entries, and these by the parameter's index."""
    masters, states = {}, {}
    for i, state in state_dict.get("state", {}).items():
        if isinstance(state, dict) and "master_param" in state:
            masters[i] = state["master_param"]
            state = {key: value for key, value in state.items() if key != "master_param"}
            if not state:
                continue
        states[i] = state
    return {**state_dict, "state": states}, masters
