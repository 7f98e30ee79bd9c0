"""State dicts and copies of optimizers: masters are saved, and FP32 state stays FP32.

torch's ``load_state_dict`` casts each tensor to the type of its parameter. That rounds FP32 state
of a half parameter, makes numbers of masks, and no state that keeps a type of its own survives.
Here a tensor comes back as it was saved, unless it had its parameter's type and the parameter has
got a wider one.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ampfuse.optim.checks import COUNT, Rule, check
from ampfuse.optim.inner import parameters, with_inner
from ampfuse.optim.kept import STATES, Kept, mode_for
from ampfuse.optim.masters import (
    HALF_DTYPES,
    MASTERS,
    MasterParameter,
    exact_float32,
    joined_master,
    split_master,
)
from ampfuse.optim.options import RULES, StateMode
from ampfuse.optim.rows import Rows
from ampfuse.optim.shards import is_sharded, on_shards

# Beside "state" in a state dict: for each parameter with state of another type, by its index, the
# type that the parameter had.
DTYPES = "param_dtypes"


class Checkpoints(Rows):
    """Mixin: ``state_dict``, ``load_state_dict``, pickle and deepcopy with masters."""

    # Attributes that a copy has too.
    _copied: tuple[str, ...] = (
        *RULES,
        "_takes_options",
        "skip_on_overflow",
        "_under_amp",
        "_amp_session",  # amp's policy and loss scalers: a copy trains on under amp
    )
    # The state dict that is being loaded.
    _loading: dict[str, Any] | None = None
    # In a subclass of a fused optimizer whose step, and state, is not ours.
    _has_own_step = False
    # Of a state, beside the states of the algorithm: tensors of the parameter's shape, and numbers;
    # and what it may lack where it has the rest.
    _whole: tuple[str, ...] = ("master_param",)
    _numbers: tuple[str, ...] = ()
    _may_lack: tuple[str, ...] = ()
    # Within a swap_ema block.
    _swapped = False

    def state_dict(self) -> dict[str, Any]:
        """As torch's, plus ``master_param`` (float32) for each parameter that has a master.

        It says itself what it holds, and every mode loads every other's: a split master is in it
        as the whole one that it stands for (4 bytes a parameter while the dict lives), a state in
        BF16 under its name, one in 8 bits under ``<name>_codes`` and ``<name>_scale``.
        """
        self.follow_edits()
        state_dict = super().state_dict()
        states = state_dict.setdefault("state", {})  # a wrapper's own format may have none
        for i, param in enumerate(parameters(self)):
            state = dict(states.get(i, {}))
            if isinstance(param, MasterParameter):
                state["master_param"] = param.detach()
            if (remainder := state.pop("master_remainder", None)) is not None:
                state["master_param"] = joined_master(param, remainder)
            if is_sharded(param):  # another mesh has other blocks of codes
                self._decode(state, param)
            if state:
                states[i] = state
        return state_dict

    def torch_state_dict(self) -> dict[str, Any]:
        """`state_dict` with all states in float32, as torch's optimizer of the name loads it."""
        state_dict = self.state_dict()
        for i, param in enumerate(parameters(self)):
            if i in state_dict["state"]:
                self._decode(state_dict["state"][i], param, ("8bit", "bf16"))
        return state_dict

    def _decode(
        self, state: dict[str, Any], param: Tensor, modes: tuple[StateMode, ...] = ("8bit",)
    ) -> None:
        """Make float32 of the states of `param` that are kept in one of `modes`."""
        with on_shards(state, param) as shards:
            for kept in Kept.of(self._algorithm, STATES.get(self._algorithm, ())):
                if kept.mode_in(shards) in modes:
                    kept.put(shards, kept.values(shards), "fp32")

    @torch.no_grad()
    def follow_edits(self) -> None:
        """Before masters are saved or copied: what was edited in the model since is in them.

        Raises RuntimeError in a swap_ema block: averages are no edits.
        """
        self._check_not_swapped("what looks at masters or saves them")
        if (
            self._table is not None
            or any("master_param" in state for state in self.state.values())
            or any(isinstance(param, MasterParameter) for param in parameters(self))
        ):
            self.param_table().refresh_masters()

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = False) -> None:
        """As torch's, without rounding FP32 state to a half parameter's type.

        Accepts state dicts of the torch optimizer of the same name and, with or without masters,
        of ampfuse, whatever its states are kept in: they are kept here as this optimizer says,
        and a warning tells if that rounds them. Masters that are not in the state dict are taken
        from the model weights; split ones are written together with their weights.

        Arguments:
            strict: refuse states that are kept in another way.

        Raises:
            ValueError: the state belongs to parameters of another number or shape; it is damaged,
                as a state dict without ``exp_avg`` or with a step count of NaN; or, with `strict`,
                it is kept in another way. RuntimeError: in a swap_ema block. Nothing has changed
                then.
        """
        self._check_not_swapped("load_state_dict()")
        if len(with_inner(self)) > 1:
            self._load_around(state_dict)
            return
        rounded: dict[str, None] = {}
        handle = self.register_load_state_dict_pre_hook(
            functools.partial(_check_and_remember, strict=strict, rounded=rounded)
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._loading = None
        if rounded:
            warnings.warn(f"loading rounds states: {', '.join(rounded)}", stacklevel=3)

    def _load_around(self, state_dict: dict[str, Any]) -> None:
        """A wrapper hands the state to the optimizers in it, which know no masters."""
        params = list(parameters(self))
        rest, masters = _without_masters(state_dict)
        for i, master in masters.items():
            if i < len(params):
                _check_tensor("master_param", master, params[i], self.parameter_names()[i])
        super().load_state_dict(rest)
        for i, param in enumerate(parameters(self)):
            if i in masters:
                exact = masters[i].detach().to(param.device, torch.float32)
                self.restore_master(param, {}, exact)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Called by load_state_dict, pickle and deepcopy alike.
        if self._loading is not None:
            self._restore_state(state["state"], self._loading)
            state["param_groups"] = [
                self._as_loaded(*pair)
                for pair in zip(self.param_groups, state["param_groups"], strict=True)
            ]
        # torch's looks for a step in each state; before the first there are masters alone, and the
        # state of another's step is not torch's.
        states = state.get("state", {})
        alone = [p for p, held in states.items() if self._has_own_step or _is_master_alone(held)]
        set_aside = {param: states.pop(param) for param in alone}
        super().__setstate__(state)
        states.update(set_aside)
        self._states_bound = False

    def _as_loaded(self, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """What `saved` is in place of `group`: how states are kept is this optimizer's choice."""
        options = {"state_dtype", *self._whole_options()}
        own = {key: value for key, value in group.items() if key in options}
        return {key: value for key, value in saved.items() if key not in options} | own

    def _whole_options(self) -> dict[str, Any]:
        """The options that are the same for all groups."""
        return {}

    def _check_loaded(self, group: dict[str, Any]) -> None:
        """Raise ValueError for a group that no step of ours can work with."""

    def _restore_state(self, state: dict[Any, Any], saved: dict[str, Any]) -> None:
        """Undo torch's casts to the parameter's dtype, and put masters where they belong."""
        ids = [i for group in saved["param_groups"] for i in group["params"]]
        dtypes = saved.get(DTYPES, {})
        for i, param in zip(ids, parameters(self), strict=True):
            was = saved["state"].get(i)
            if not isinstance(was, dict):
                continue
            for key, value in was.items():
                if key == "master_param":
                    exact = value.detach().to(device=param.device, dtype=torch.float32, copy=True)
                    self.restore_master(param, state[param], exact)
                elif key != "step":  # torch knows where and in which type that belongs
                    state[param][key] = _uncast(value, state[param][key], param, dtypes.get(i))
            held = self._table is not None and MASTERS & self.state.get(param, {}).keys()
            if held and not MASTERS & state[param].keys():  # the weight is all that was saved
                self.restore_master(param, state[param], exact_float32(param))

    def restore_master(self, param: Tensor, state: dict[str, Any], master: Tensor) -> None:
        """Make `master` (float32) the master of `param`, a parameter of the groups.

        Arguments:
            state: of `param`, about to be the optimizer's.
        """
        state.pop("master_param", None)
        if isinstance(param, MasterParameter):
            with torch.no_grad():
                param.copy_(master)
            param.model_version = param.model_param._version
        elif self._is_split(param):
            state["master_remainder"] = remainder = self._remainder(param)
            split_master(master, param, remainder)
        elif self.master_weights and param.dtype in HALF_DTYPES:
            old = self.state[param].get("master_param") if self._table is not None else None
            if old is not None:  # the table's row holds this tensor
                old.copy_(master)
                master = old
            state["master_param"] = master
            state["_model_version"] = param._version
        if self._table is not None:
            # Loading the model before or after this gives the weights these masters round to.
            self._table.accept_model_weights()
            state.pop("_model_version", None)

    def _check_not_swapped(self, what: str) -> None:
        if self._swapped:
            raise RuntimeError(
                f"{what} inside a swap_ema block, where the model has its averages; do that after "
                "the block"
            )

    def _mode_of(self, group: dict[str, Any]) -> StateMode:
        """How a step of ours keeps the states of `group`."""
        return "fp32"

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The state of the parameter's shape that a step of ours has in `group`."""
        return ()

    def __getstate__(self) -> dict[str, Any]:
        self.follow_edits()
        own = {key: self.__dict__[key] for key in self._copied if key in self.__dict__}
        return {**super().__getstate__(), **own}


def _is_master_alone(state: Any) -> bool:
    return isinstance(state, dict) and bool(state) and state.keys() <= {*MASTERS, "_model_version"}


def own_dtypes(params: Iterable[Tensor], states: dict[Any, Any]) -> dict[int, torch.dtype]:
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


def _uncast(saved: Any, loaded: Any, param: Tensor, was: torch.dtype | None) -> Any:
    """`loaded`, which torch made of the state `saved`, without the casts that lose something.

    Arguments:
        was: the type of the parameter when its state was saved, if known.
    """
    if isinstance(saved, Tensor):
        keep = (
            not saved.is_floating_point()
            or (was is not None and saved.dtype != was)
            or (saved.dtype != param.dtype and param.dtype in HALF_DTYPES)
        )
        return saved.detach().to(param.device, copy=True) if keep else loaded
    if isinstance(saved, dict):
        return {key: _uncast(value, loaded[key], param, was) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        pairs = zip(saved, loaded, strict=True)
        return type(saved)(_uncast(before, after, param, was) for before, after in pairs)
    return loaded


def _without_masters(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[int, Tensor]]:
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
            group = {**own, **optimizer._as_loaded(own, saved)}
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
    if not isinstance(state, dict):
        if optimizer._algorithm != "none":
            raise ValueError(f"the state for {name} is {state!r}, and no dict")
        return
    for key in optimizer._whole:
        _check_tensor(key, state.get(key), param, name)
    if optimizer._has_own_step:  # and a state of its own
        return
    found = {key for key, value in state.items() if value is not None}
    wanted, known = [*optimizer._numbers], {*optimizer._numbers}
    for key in found & known:
        check(f"{key} for {name}", state[key], COUNT)
    mode = mode_for(optimizer._mode_of(group), param)
    for kept in Kept.of(optimizer._algorithm, optimizer._state_names(group)):
        for key, shape in kept.shapes(param).items():
            rule = _CODES if key == kept.keys[1] else _VALUES
            _check_tensor(key, state.get(key), param, name, shape, rule)
        had = kept.mode_in(state)
        wanted += kept.keys_in(had or "fp32")
        known.update(kept.keys)
        if had not in (None, mode) and strict:
            raise ValueError(
                f"it has {kept.name} of {name} in {had}, and this optimizer keeps it in {mode}. "
                f"Build it with state_dtype={had!r}, or load with strict=False, which converts"
            )
        if had not in (None, mode) and mode != "fp32":
            rounded[f"{kept.name} from {had} to {mode}"] = None
    lost = [key for key in wanted if key not in found and key not in optimizer._may_lack]
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
