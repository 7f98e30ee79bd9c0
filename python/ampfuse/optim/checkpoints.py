"""State dicts and copies of optimizers: masters are saved, and FP32 state stays FP32.

torch's ``load_state_dict`` casts each tensor to the type of its parameter. That rounds FP32 state
of a half parameter, makes numbers of masks, and no state that keeps a type of its own survives.
Here a tensor comes back as it was saved, unless it had its parameter's type and the parameter has
got a wider one.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ampfuse._schema import STORAGES
from ampfuse.optim.checks import COUNT, Rule, check
from ampfuse.optim.inner import parameters
from ampfuse.optim.masters import (
    HALF_DTYPES,
    MASTERS,
    MasterParameter,
    exact_float32,
    joined_master,
)
from ampfuse.optim.shards import is_sharded, on_shards
from ampfuse.optim.stored import FP32, Stored, storage_for

# Beside "state" in a state dict: for each parameter with state of another type, by its index, the
# type that the parameter had.
DTYPES = "param_dtypes"


def with_masters(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """torch's `state_dict` with all masters, in whatever form they are kept."""
    states = state_dict.setdefault("state", {})  # a wrapper's own format may have none
    for i, param in enumerate(parameters(optimizer)):
        state = dict(states.get(i, {}))
        if isinstance(param, MasterParameter):
            state["master_param"] = param.detach()
        if (remainder := state.pop("master_remainder", None)) is not None:
            state["master_param"] = joined_master(param, remainder)
        if is_sharded(param):  # another mesh has other blocks of codes
            _decode(optimizer, state, param, with_blocks_only=True)
        if state:
            states[i] = state
    if optimizer.algorithm.name == "none" and (
        dtypes := _own_dtypes(parameters(optimizer), states)
    ):
        return {**state_dict, DTYPES: dtypes}
    return state_dict


def in_float32(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict` with all states in float32."""
    for i, param in enumerate(parameters(optimizer)):
        if i in state_dict["state"]:
            _decode(optimizer, state_dict["state"][i], param)
    return state_dict


def _decode(
    optimizer: Any, state: dict[str, Any], param: Tensor, *, with_blocks_only: bool = False
) -> None:
    """Make float32 of the states of `param`; `with_blocks_only`: of those that have scales."""
    algorithm = optimizer.algorithm
    with on_shards(state, param) as shards:
        for stored in Stored.of(algorithm.name, algorithm.states):
            storage = stored.storage_in(shards)
            if storage not in (None, FP32) and (storage.block or not with_blocks_only):
                stored.put(shards, stored.values(shards), FP32)


def load(
    optimizer: Any, state_dict: dict[str, Any], by: Callable[[Any], None], *, strict: bool
) -> None:
    """Load with torch's `by`, after a look at everything."""
    rounded: dict[str, None] = {}
    handle = optimizer.register_load_state_dict_pre_hook(
        functools.partial(_check_and_remember, strict=strict, rounded=rounded)
    )
    try:
        by(state_dict)
    finally:
        handle.remove()
        optimizer._loading = None
    if rounded:
        warnings.warn(f"loading rounds states: {', '.join(rounded)}", stacklevel=4)


def load_around(optimizer: Any, state_dict: dict[str, Any], by: Callable[[Any], None]) -> None:
    """A wrapper hands the state to the optimizers in it, which know no masters."""
    states = {
        i: dict(state) if isinstance(state, dict) else state
        for i, state in state_dict.get("state", {}).items()
    }
    masters = {
        i: state.pop("master_param")
        for i, state in states.items()
        if isinstance(state, dict) and "master_param" in state
    }
    names = optimizer.parameter_names()
    for i, param in enumerate(parameters(optimizer)):
        _check_tensor("master_param", masters.get(i), param, names[i])
    by({**state_dict, "state": {i: s for i, s in states.items() if s or i not in masters}})
    for i, param in enumerate(parameters(optimizer)):
        if i in masters:
            exact = masters[i].detach().to(param.device, torch.float32)
            optimizer.restore_master(param, {}, exact)


def restore_state(optimizer: Any, state: dict[str, Any], saved: dict[str, Any]) -> None:
    """Undo, in what torch made of `saved`, its casts; put masters where they belong."""
    _restore_tensors(optimizer, state["state"], saved)
    pairs = zip(optimizer.param_groups, state["param_groups"], strict=True)
    state["param_groups"] = [_as_loaded(optimizer, *pair) for pair in pairs]


def _as_loaded(optimizer: Any, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """What `saved` is in place of `group`: how states are stored is this optimizer's choice."""
    options = {"state_dtype", *optimizer._whole_options()}
    own = {key: value for key, value in group.items() if key in options}
    return {key: value for key, value in saved.items() if key not in options} | own


def _restore_tensors(optimizer: Any, state: dict[Any, Any], saved: dict[str, Any]) -> None:
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    dtypes = saved.get(DTYPES, {})
    has_table = optimizer._rows.table is not None
    for i, param in zip(ids, parameters(optimizer), strict=True):
        was = saved["state"].get(i)
        if not isinstance(was, dict):
            continue
        for key, value in was.items():
            if key == "master_param":
                exact = value.detach().to(device=param.device, dtype=torch.float32, copy=True)
                optimizer.restore_master(param, state[param], exact)
            elif key != "step":  # torch knows where and in which type that belongs
                uncast = functools.partial(_uncast, param, dtypes.get(i))
                state[param][key] = tree_map(uncast, value, state[param][key])
        held = has_table and MASTERS & optimizer.state.get(param, {}).keys()
        if held and not MASTERS & state[param].keys():  # the weight is all that was saved
            optimizer.restore_master(param, state[param], exact_float32(param))


def is_master_alone(state: Any) -> bool:
    """Whether the state of a parameter is what it has before the first step."""
    return isinstance(state, dict) and bool(state) and state.keys() <= {*MASTERS, "_model_version"}


def _own_dtypes(params: Iterable[Tensor], states: dict[Any, Any]) -> dict[int, torch.dtype]:
    """What stands under `DTYPES`."""
    found = {}
    for i, param in enumerate(params):
        state = states.get(i)
        if isinstance(state, dict):
            state = {key: state[key] for key in state.keys() - {"step", "master_param"}}
        tensors = [value for value in tree_leaves(state) if isinstance(value, Tensor)]
        if any(each.is_floating_point() and each.dtype != param.dtype for each in tensors):
            found[i] = param.dtype
    return found


def _uncast(param: Tensor, was: torch.dtype | None, saved: Any, loaded: Any) -> Any:
    """`loaded`, which torch made of `saved` in a state, unless its cast loses something.

    Arguments:
        was: the type of the parameter when its state was saved, if known.
    """
    if isinstance(saved, Tensor) and (
        not saved.is_floating_point()
        or (was is not None and saved.dtype != was)
        or (saved.dtype != param.dtype and param.dtype in HALF_DTYPES)
    ):
        return saved.detach().to(param.device, copy=True)
    return loaded


def _check_and_remember(
    optimizer: Any, state_dict: dict[str, Any], *, strict: bool, rounded: dict[str, None]
) -> None:
    """Pre-hook of load_state_dict: refuse what does not fit before anything changes.

    Only what a step of ours reads is looked at; the rest is free. What loading rounds is noted in
    `rounded`.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(f"the state dict has no {key!r}, but {list(state_dict)}")
    names = iter(optimizer.parameter_names())
    groups = enumerate(zip(optimizer.param_groups, state_dict["param_groups"], strict=False))
    try:
        for i, (own, saved) in groups:
            if len(own["params"]) != len(saved["params"]):
                break  # torch says what is wrong
            group = {**own, **_as_loaded(optimizer, own, saved)}
            try:
                optimizer._check_loaded(group)
            except ValueError as error:
                raise ValueError(f"in parameter group {i}, {error}") from None
            for param, key, name in zip(own["params"], saved["params"], names, strict=False):
                if (state := state_dict["state"].get(key)) is not None:
                    _check_state(optimizer, group, param, state, name, strict, rounded)
    except ValueError as error:
        raise ValueError(f"the state dict does not fit: {error}. Nothing was loaded.") from None
    optimizer._loading = state_dict


def _check_state(
    optimizer: Any,
    group: dict[str, Any],
    param: Tensor,
    state: Any,
    name: str,
    strict: bool,
    rounded: dict[str, None],
) -> None:
    """Raise ValueError unless a step of ours can go on with `state`: it has all or nothing."""
    algorithm = optimizer.algorithm
    if not isinstance(state, dict):
        if algorithm.name != "none":
            raise ValueError(f"the state for {name} is {state!r}, and no dict")
        return
    for key in ("master_param",) if algorithm.name == "none" else ("master_param", "ema"):
        _check_tensor(key, state.get(key), param, name)
    if algorithm.name == "none" or optimizer._has_own_step:  # and a state of its own
        return
    found = {key for key, value in state.items() if value is not None}
    may_lack = set() if algorithm.uses_count else {"step"}
    wanted, known = [*algorithm.numbers], {*algorithm.numbers}
    for key in found & known:
        check(f"{key} for {name}", state[key], COUNT)
    storage = storage_for(optimizer._states.storage_of(group), param)
    for stored in Stored.of(algorithm.name, algorithm.states_in(group)):
        for of in STORAGES.values():
            for i, (key, shape) in enumerate(stored.shapes(param, of).items()):
                rule = _CODES if of.block and i == 0 else _VALUES
                _check_tensor(key, state.get(key), param, name, shape, rule)
        had = stored.storage_in(state, storage)
        keys = (had or FP32).keys(stored.name)
        wanted += keys
        known.update(stored.keys)
        if algorithm.starts_at_gradient:
            may_lack.update(keys[:1] if had is None else ())
        if had not in (None, storage) and strict:
            raise ValueError(
                f"it has {stored.name} of {name} in {had.name}, and this optimizer keeps it in "
                f"{storage.name}. Build it with state_dtype={had.name!r}, or load with "
                "strict=False, which converts"
            )
        if had not in (None, storage) and storage is not FP32:
            rounded[f"{stored.name} from {had.name} to {storage.name}"] = None
    lost = [key for key in wanted if key not in found and key not in may_lack]
    if lost and found & known:
        raise ValueError(f"{lost[0]} for {name} is missing; there are {', '.join(state)}")


_VALUES = Rule(lambda value: value.is_floating_point(), "a tensor of floating point numbers")
_CODES = Rule(lambda value: value.dtype == torch.uint8, "a tensor of uint8")


def _check_tensor(
    key: str,
    value: Any,
    param: Tensor,
    name: str,
    shape: tuple[int, ...] | None = None,
    rule: Rule = _VALUES,
) -> None:
    """Raise ValueError for a tensor of a state that is none of `shape`, the parameter's if None."""
    if value is None:
        return
    check(f"{key} for {name}", value, rule)
    if value.shape != (param.shape if shape is None else shape):
        raise ValueError(
            f"{key} for {name} has shape {tuple(value.shape)}, the parameter "
            f"{tuple(param.shape)}: it was saved from another model"
        )
