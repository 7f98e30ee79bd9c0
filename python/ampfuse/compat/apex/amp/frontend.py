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
from ampfuse.amp.initialize import make_session, set_up, turn_off
from ampfuse.compat.apex.amp._amp_state import _amp_state, add_stash, warn_or_err
from ampfuse.compat.apex.amp.handle import AmpHandle, NoOpHandle
from ampfuse.compat.apex.amp.scaler import LossScaler, after_pass

_UNSET = {
    "enabled": False,
    "opt_level": None,
    "cast_model_type": None,
    "patch_torch_functions": False,
    "patch_torch_functions_type": None,
    "keep_batchnorm_fp32": None,
    "master_weights": None,
    "loss_scale": 1.0,
}


class Properties(types.SimpleNamespace):
    """The options in force, as attributes; ``options`` is their dict."""

    options = property(vars)

    def __init__(self) -> None:
        super().__init__(**_UNSET)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            raise AttributeError(f"amp has no property {name!r}; it has {list(self.options)}")
        super().__setattr__(name, value)


def _filled(properties: Properties, policy: policies.Policy) -> Properties:
    for name in properties.options:
        setattr(properties, name, True if name == "enabled" else getattr(policy, name))
    return properties


def _level(name: str) -> Any:
    policy = policies.LEVELS[name]

    class Level:
        """A level of apex: a call fills a :class:`Properties` with its defaults."""

        brief = f"{name}: {policy.brief}"
        more = policy.brief

        def __call__(self, properties: Properties) -> Properties:
            return _filled(properties, policy)

    Level.__name__ = Level.__qualname__ = name
    return Level


O0, O1, O2, O3, O4, O5 = map(_level, policies.LEVELS)
opt_levels = {level.__name__: level() for level in (O0, O1, O2, O3, O4, O5)}


def _overridden(level: policies.Policy, overrides: dict[str, Any]) -> policies.Policy:
    """`level` with what was given; where it contradicts the level, ``hard_override`` decides."""
    fields: dict[str, Any] = {}
    accepted: dict[str, Any] = {}
    for name, value in overrides.items():
        try:
            policy = policies.make_policy(level.opt_level, **accepted, **{name: value})
            fields[name] = getattr(policy, name)
            accepted[name] = value
        except RuntimeError as error:
            warn_or_err(str(error))
            fields[name] = {"True": True, "False": False}.get(value, value)
    if fields.get("patch_torch_functions") and level.patch_torch_functions_type is None:
        fields.setdefault("patch_torch_functions_type", torch.float16)
    return dataclasses.replace(level, **fields)


def initialize(
    models: Any, optimizers: Any = None, enabled: bool = True, opt_level: str = "O1",
    cast_model_type: Any = None, patch_torch_functions: Any = None, keep_batchnorm_fp32: Any = None,
    master_weights: Any = None, loss_scale: Any = None, cast_model_outputs: Any = None,
    num_losses: int = 1, verbosity: int = 1, min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24, *, patch_torch_functions_type: Any = None,
) -> Any:  # fmt: skip
    """:func:`ampfuse.amp.initialize` with apex's arguments, by position too.

    At O1 and O4 autocast stays on outside ``forward`` too, see
    :func:`ampfuse.amp.cast_everywhere`. Each overflow prints apex's line unless `verbosity` is 0.
    Errors are ampfuse's; an ``FP16_Optimizer`` raises RuntimeError too. For contradictory
    options they are warnings if ``_amp_state.hard_override`` is set.

    Source: ``apex.amp.initialize``; O4 and O5 from ROCm/apex.
    """
    properties = Properties()
    _amp_state.opt_properties = properties
    _amp_state.verbosity = verbosity
    if not enabled:
        _amp_state.handle = NoOpHandle()
        return turn_off(models, optimizers, sessions.Session(policy=None, verbosity=verbosity))

    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "patch_torch_functions_type": patch_torch_functions_type,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
    }
    level = policies.make_policy(opt_level, cast_model_outputs=cast_model_outputs)
    policy = _overridden(level, {n: value for n, value in overrides.items() if value is not None})
    _filled(properties, policy)
    listed = _as_list(optimizers)
    _refuse_fp16_optimizer(listed)
    # From 2 on scale_loss would log the overflows that after_pass prints.
    session = make_session(
        policy, num_losses, min(verbosity, 1), scaler=LossScaler, min_loss_scale=min_loss_scale,
        max_loss_scale=max_loss_scale,
    )  # fmt: skip
    session.everywhere, session.after_pass = True, after_pass
    # Scripts save scalers as objects. They hold numbers only: weights_only=True may load them.
    torch.serialization.add_safe_globals([LossScaler])
    allow_half = _amp_state.allow_incoming_model_not_fp32 or _amp_state.hard_override
    result = set_up(models, optimizers, session, allow_half=allow_half)

    _amp_state.min_loss_scale = min_loss_scale
    _amp_state.max_loss_scale = max_loss_scale
    _amp_state.handle = _new_handle(session, policy, _as_list(models))
    for optimizer in listed:
        add_stash(optimizer)
    return result


def _as_list(value: Any) -> list[Any]:
    listed = list(value) if isinstance(value, (list, tuple)) else [value]
    return [] if value is None else listed


def _refuse_fp16_optimizer(optimizers: list[Any]) -> None:
    from ampfuse.compat.apex.fp16_utils import FP16_Optimizer  # it imports apex.amp

    if any(isinstance(optimizer, FP16_Optimizer) for optimizer in optimizers):
        raise RuntimeError(
            "amp.initialize does not support FP16_Optimizer: both create FP32 masters and scale "
            "the loss. Pass a new optimizer that is not wrapped, or keep FP16_Optimizer and do not "
            "use amp."
        )


def _new_handle(
    session: sessions.Session, policy: policies.Policy, models: list[Any]
) -> NoOpHandle:
    """The handle of `models`; where `policy` casts functions, these are replaced now."""
    if policy.autocast_type is None:
        return NoOpHandle(models)
    from ampfuse.compat.apex.amp.amp import replace_functions  # it has this module's names

    replace_functions()
    on = Casts.of(policy)
    off = Casts(inputs=on.inputs, outputs=on.outputs)
    return AmpHandle(session, dict.fromkeys(models, (on, off)))
