"""``apex.amp.frontend``: ``initialize`` with apex's arguments, levels and their properties."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch

from ampfuse.amp import load_state_dict as load_state_dict
from ampfuse.amp import policy as policies
from ampfuse.amp import session as sessions
from ampfuse.amp import state_dict as state_dict
from ampfuse.amp.casts import Casts
from ampfuse.amp.initialize import set_up, turn_off
from ampfuse.compat.apex.amp._amp_state import _amp_state, add_stash, warn_or_err
from ampfuse.compat.apex.amp.handle import AmpHandle, NoOpHandle, replace_functions
from ampfuse.compat.apex.amp.scaler import LossScaler
from ampfuse.compat.apex.signatures import takes


class Properties(types.SimpleNamespace):
    """The options in force, as attributes; ``options`` is their dict."""

    options = property(vars)

    def __init__(self) -> None:
        names = "enabled opt_level cast_model_type patch_torch_functions patch_torch_functions_type"
        unset = dict.fromkeys(f"{names} keep_batchnorm_fp32 master_weights loss_scale".split())
        super().__init__(**unset | {"enabled": False, "patch_torch_functions": False})
        self.loss_scale = 1.0

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            raise AttributeError(f"amp has no property {name!r}; it has {list(self.options)}")
        super().__setattr__(name, value)


def _filled(properties: Properties, policy: policies.Policy) -> Properties:
    for name in properties.options:
        setattr(properties, name, True if name == "enabled" else getattr(policy, name))
    return properties


def _level(name: str) -> Any:
    """A class whose instances fill a :class:`Properties` with the defaults of a level."""
    level = policies.LEVELS[name]
    texts = {"brief": f"{name}: {level.brief}", "more": level.brief}
    return type(name, (), {"__call__": lambda _, into: _filled(into, level), **texts})


O0, O1, O2, O3, O4, O5 = map(_level, policies.LEVELS)
opt_levels = {level.__name__: level() for level in (O0, O1, O2, O3, O4, O5)}


def _overridden(level: policies.Policy, overrides: dict[str, Any]) -> policies.Policy:
    """`level` with what was given; where it contradicts the level, ``hard_override`` decides."""
    fields = {}
    for name, value in overrides.items():
        try:
            fields[name] = getattr(policies.make_policy(level.opt_level, **{name: value}), name)
        except RuntimeError as error:
            warn_or_err(str(error))
            fields[name] = {"True": True, "False": False}.get(value, value)
    if fields.get("patch_torch_functions") and level.patch_torch_functions_type is None:
        fields.setdefault("patch_torch_functions_type", torch.float16)
    return dataclasses.replace(level, **fields)


@takes(
    "optimizers=None enabled=True opt_level='O1' cast_model_type=None patch_torch_functions=None "
    "keep_batchnorm_fp32=None master_weights=None loss_scale=None cast_model_outputs=None "
    "num_losses=1 verbosity=1 min_loss_scale=None max_loss_scale=16777216.0 * "
    "patch_torch_functions_type=None",
    first="models",
)
def initialize(models: Any, given: dict[str, Any]) -> Any:
    """:func:`ampfuse.amp.initialize` with apex's arguments, by position too.

    At O1 and O4 autocast stays on outside ``forward`` too, see
    :func:`ampfuse.amp.cast_everywhere`. With ``verbosity=1`` each overflow is printed, in apex's
    words. Errors are ampfuse's; an ``FP16_Optimizer`` is a RuntimeError too. For contradictory
    options they are warnings if ``_amp_state.hard_override`` is set.

    Source: ``apex.amp.initialize``; O4 and O5 from ROCm/apex.
    """
    optimizers, properties = given["optimizers"], Properties()
    _amp_state.opt_properties = properties
    _amp_state.verbosity = verbosity = given["verbosity"]
    if not given["enabled"]:
        _amp_state.handle = NoOpHandle()
        return turn_off(models, optimizers, sessions.Session(policy=None, verbosity=verbosity))

    level = policies.make_policy(given["opt_level"], cast_model_outputs=given["cast_model_outputs"])
    options = [name for name in properties.options if name not in ("enabled", "opt_level")]
    policy = _overridden(level, {n: given[n] for n in options if given[n] is not None})
    _filled(properties, policy)
    from ampfuse.compat.apex.fp16_utils import FP16_Optimizer  # imports from here

    listed = _as_list(optimizers)
    if any(isinstance(optimizer, FP16_Optimizer) for optimizer in listed):
        raise RuntimeError(
            "amp.initialize does not support FP16_Optimizer: both create FP32 masters and scale "
            "the loss. Pass a new optimizer that is not wrapped, or keep FP16_Optimizer and do not "
            "use amp."
        )
    if not (isinstance(count := given["num_losses"], int) and count >= 1):
        raise ValueError(f"num_losses must be an integer of at least 1, not {count!r}.")
    bounds = {name: given[name] for name in ("min_loss_scale", "max_loss_scale")}
    scalers = [LossScaler(policy.loss_scale, **bounds) for _ in range(count)]
    session = sessions.Session(policy, list(scalers), verbosity, everywhere=True)
    allow_half = _amp_state.allow_incoming_model_not_fp32 or _amp_state.hard_override
    result = set_up(models, optimizers, session, allow_half=allow_half)

    vars(_amp_state).update(bounds)
    _amp_state.handle = NoOpHandle(_as_list(models))
    if policy.autocast_type is not None:
        replace_functions()
        on = Casts.of(policy)
        casts = on, Casts(inputs=on.inputs, outputs=on.outputs)
        _amp_state.handle = AmpHandle(session, dict.fromkeys(_as_list(models), casts))
    for optimizer in listed:
        add_stash(optimizer)
    return result


def _as_list(value: Any) -> list[Any]:
    listed = list(value) if isinstance(value, (list, tuple)) else [value]
    return [] if value is None else listed
