"""State dicts and copies of optimizers: masters are saved, and FP32 state stays FP32.

torch's ``load_state_dict`` casts each tensor to the type of its parameter. That rounds the FP32
state of a half parameter, and turns masks and quantized states into floating point numbers. Here a
tensor keeps its saved type, unless it is half and the parameter is not.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ampfuse._schema import ALGORITHMS, Algorithm
from ampfuse.optim.last_step import StepHistory
from ampfuse.optim.masters import (
    MASTERS,
    MasterParameter,
    exact_float32,
    has_begun,
    with_whole_master,
    without_gradient,
)
from ampfuse.optim.options import COUNT, check
from ampfuse.optim.param_groups import parameters, with_groups
from ampfuse.optim.sharding import is_sharded, on_shards
from ampfuse.optim.state import FP32, StateSpec
from ampfuse.torch_utils import HALF_DTYPES

# The key of the step history. torch.distributed.checkpoint only saves states and groups, and finds
# it in the first group.
HISTORY = "step_history"


def with_masters(optimizer: Any, state_dict: dict[str, Any], *, decoded: bool) -> dict[str, Any]:
    """torch's `state_dict` with the step history and all masters, whole or split.

    Its tensors are the optimizer's own, so it takes no memory. `decoded`: split masters become
    whole, and quantized states float32, as those of shards always are: another mesh has other
    blocks, and no collective takes int16.
    """
    states = state_dict.setdefault("state", {})  # a wrapper's own format may have none
    for i, (group, param) in enumerate(with_groups(optimizer)):
        state = dict(without_gradient(states.get(i, {})))
        if isinstance(param, MasterParameter):
            state["master_param"] = param.detach()
        if decoded or is_sharded(param):
            _decode(optimizer.algorithm_in(group), state, param, with_blocks_only=True)
        if state:
            states[i] = state
    history = optimizer._rows.history()
    if history is not None and not decoded:
        state_dict[HISTORY] = history.clone()
    return state_dict


def in_float32(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict` with all states in float32, and without a step history."""
    state_dict.pop(HISTORY, None)
    for i, (group, param) in enumerate(with_groups(optimizer)):
        if i in state_dict["state"]:
            _decode(optimizer.algorithm_in(group), state_dict["state"][i], param)
    return state_dict


def _decode(
    algorithm: Algorithm, state: dict[str, Any], param: Tensor, *, with_blocks_only: bool = False
) -> None:
    """Convert master and states to float32; `with_blocks_only`: states that have scales."""
    with_whole_master(state, param)
    with on_shards(state, param) as shards:
        for stored in StateSpec.of(algorithm):
            storage = stored.storage_in(shards)
            if storage not in (None, FP32) and (storage.block or not with_blocks_only):
                stored.put(shards, stored.values(shards), FP32)


def load(optimizer: Any, state_dict: dict[str, Any], by: Callable[[Any], None]) -> None:
    """Load with torch's `by`, after all checks."""
    handle = optimizer.register_load_state_dict_pre_hook(_check_and_remember)
    try:
        by(state_dict)
    finally:
        handle.remove()
        optimizer._loading = None


def load_around(optimizer: Any, state_dict: dict[str, Any], by: Callable[[Any], None]) -> None:
    """Load through a wrapper, which hands the state to optimizers that do not support masters."""
    groups = [dict(group) for group in state_dict.get("param_groups", ())]
    keys = [key for group in groups for key in group["params"]]
    places = {key: i for i, key in enumerate(keys)}  # torch.distributed.checkpoint has names
    history = _take_history(state_dict, groups)
    for group in groups:
        group["params"] = [places[key] for key in group["params"]]
    states = {
        places.get(key, key): dict(state) if isinstance(state, dict) else state
        for key, state in state_dict.get("state", {}).items()
    }
    masters = {
        i: {key: state.pop(key) for key in MASTERS & state.keys()}
        for i, state in states.items()
        if isinstance(state, dict)
    }
    names = optimizer._rows.parameter_names()
    for i, param in enumerate(parameters(optimizer)):
        for key, value in masters.get(i, {}).items():
            _check_tensor(key, value, tuple(param.shape), names[i])
    states = {i: state for i, state in states.items() if state or not masters.get(i)}
    by({**state_dict, "state": states} | ({"param_groups": groups} if groups else {}))
    _restore_masters(optimizer, [masters.get(i, {}) for i in range(len(names))], defaultdict(dict))
    optimizer.load_history(history)


def restore_state(optimizer: Any, state: dict[str, Any], saved: dict[str, Any]) -> None:
    """Put the tensors of `saved` into `state`, one at a time, and restore masters."""
    optimizer.release_states()
    states = state["state"]
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    entries = [saved["state"].get(i) for i in ids]
    saved_states = [entry if isinstance(entry, dict) else {} for entry in entries]
    _restore_masters(optimizer, saved_states, states)
    for saved_state, param in zip(saved_states, parameters(optimizer), strict=True):
        for key, value in saved_state.items():
            # torch puts a step count on the right device, in the right type.
            if key not in MASTERS and key != "step":
                states[param][key] = tree_map(functools.partial(_loaded, param), value)
    for param in parameters(optimizer) if optimizer._rows.table is not None else ():
        held = MASTERS & optimizer.state.get(param, {}).keys()
        if held and not MASTERS & states[param].keys():  # only the weight was saved
            optimizer.restore_master(param, states[param], exact_float32(param))
    pairs = zip(optimizer.param_groups, state["param_groups"], strict=True)
    state["param_groups"] = [_as_loaded(optimizer, *pair) for pair in pairs]
    optimizer.load_history(_take_history(saved, state["param_groups"]))


def _take_history(saved: dict[str, Any], groups: list[dict[str, Any]]) -> Any:
    of_group = groups[0].pop(HISTORY, None) if groups else None
    return saved.get(HISTORY, of_group)


def _as_loaded(optimizer: Any, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """The group after `saved` was loaded into `group`: `saved` with the choices of `group`."""
    choices = optimizer._group_choices
    own = {key: group[key] for key in choices if key in group}
    return {key: value for key, value in saved.items() if key not in choices} | own


def _restore_masters(
    optimizer: Any, saved_states: list[dict[str, Any]], states: dict[Tensor, dict[str, Any]]
) -> None:
    """Restore the masters in `saved_states`, one for each parameter; `states` are about to be the
    optimizer's."""
    for saved, param in zip(saved_states, parameters(optimizer), strict=True):
        for key in (key for key in saved if key in MASTERS):
            dtype = torch.float32 if key == "master_param" else torch.int16
            exact = saved[key].detach().to(param.device, dtype, copy=True)
            optimizer._rows.restore_master(param, states[param], exact, key)


def _loaded(param: Tensor, saved: Any) -> Any:
    """A copy for the state of `param`, of its type if that is wider than a half one."""
    if not isinstance(saved, Tensor):
        return saved
    is_narrow = saved.dtype in HALF_DTYPES and param.dtype not in HALF_DTYPES
    dtype = param.dtype if is_narrow else saved.dtype
    return saved.detach().to(param.device, dtype, copy=True)


def _check_and_remember(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Pre-hook of load_state_dict: raise for a state that does not fit before anything changes.

    Only values that a fused step reads are checked. torch gets the state dict with their names and
    step counts alone: it would cast, and hold, a copy of all of them.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"the state dict has no {key!r}; its keys are {list(state_dict)}")
    for holder in (state_dict, *state_dict["param_groups"][:1]):
        _check_tensor(HISTORY, holder.get(HISTORY), (len(StepHistory._fields),), "the optimizer")
    names = iter(optimizer._rows.parameter_names())
    for own, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        if len(own["params"]) != len(saved["params"]):
            break  # torch says what is wrong
        group = {**own, **_as_loaded(optimizer, own, saved)}
        for param, key, name in zip(own["params"], saved["params"], names, strict=False):
            state = state_dict["state"].get(key)
            if isinstance(state, dict):
                _check_state(optimizer, group, param, state, name)
                # Flat states of torch.distributed.checkpoint may lack the masters.
                if isinstance(key, str) and optimizer._rows.has_master(param) and has_begun(state):
                    _check_has(["master_param"], state, name)
    optimizer._loading = state_dict
    states = dict(state_dict["state"])
    for key in (key for group in state_dict["param_groups"] for key in group["params"]):
        if isinstance(state := states.get(key), dict):
            states[key] = {name: state[name] if name == "step" else None for name in state}
    return {**state_dict, "state": states}


def _check_state(
    optimizer: Any, group: dict[str, Any], param: Tensor, state: dict[str, Any], name: str
) -> None:
    """Raise ValueError unless a step can continue from `state`, which is complete or empty."""
    algorithm = optimizer.algorithm_in(group)
    shapes = dict.fromkeys(MASTERS, tuple(param.shape))
    needed: list[str] = []
    if algorithm.name != "none" and not optimizer._has_own_step:
        shapes["ema"] = tuple(param.shape)
        _check_is_own(optimizer, algorithm, state, name)
        for key in state.keys() & {*algorithm.numbers}:
            check(f"{key} for {name}", state[key], COUNT)
        if algorithm.uses_count:
            needed += algorithm.numbers
        for stored in StateSpec.of(algorithm, group):
            storage = stored.storage_in(state)
            shapes |= stored.shapes(param, storage or FP32)
            if storage is not None or not algorithm.starts_at_gradient:
                needed += (storage or FP32).keys(stored.name)
    for key, shape in shapes.items():
        _check_tensor(key, state.get(key), shape, name)
    if not state.keys() <= {*MASTERS, "ema"}:
        _check_has(needed, state, name)


def _keys_of(algorithm: Algorithm) -> set[str]:
    return {*algorithm.numbers, *(key for each in StateSpec.of(algorithm) for key in each.keys)}


def _check_is_own(optimizer: Any, algorithm: Algorithm, state: dict[str, Any], name: str) -> None:
    """Raise ValueError for another optimizer's state. A user's class may keep more."""
    keys = {kind: _keys_of(ALGORITHMS[kernel]) for kind, kernel in optimizer.kinds.items()}
    strange = state.keys() & set().union(*keys.values()) - _keys_of(algorithm)
    if not strange or "_algorithm" not in vars(type(optimizer)):
        return
    whose = " or ".join(kind for kind in keys if strange <= keys[kind]) or "another optimizer"
    raise ValueError(
        f"the state dict is from {whose}: it has {' and '.join(sorted(strange))} for {name}, which "
        f"{type(optimizer).__name__} does not use. Set its 'state' to {{}} to start with a new "
        "state. Nothing was loaded."
    )


def _check_has(keys: list[str], state: dict[str, Any], name: str) -> None:
    for key in keys:
        if state.get(key) is None:
            raise ValueError(
                f"{key} for {name} is missing in the state dict, which has {', '.join(state)}. "
                "Nothing was loaded."
            )


def _check_tensor(key: str, value: Any, shape: tuple[int, ...], name: str) -> None:
    if value is None:
        return
    if tuple(getattr(value, "shape", ())) != shape:
        what = f"has shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"is {value!r}"
        right = f"a tensor of shape {shape}"
    elif key == "master_remainder" and value.dtype != torch.int16:
        what, right = f"is {value.dtype}", "int16, as it was saved"
    else:
        return
    raise ValueError(
        f"{key} for {name} {what} in the state dict; it must be {right}. Nothing was loaded."
    )
