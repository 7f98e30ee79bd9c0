"""``apex.amp.frontend``: ``initialize`` with apex's arguments, levels and their properties."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ampfuse.amp import load_state_dict as load_state_dict
from ampfuse.amp import policy as policies
from ampfuse.amp import session as sessions
from ampfuse.amp import state_dict as state_dict
from ampfuse.amp.initialize import set_up, turn_off
from ampfuse.compat.apex.amp import patches
from ampfuse.compat.apex.amp._amp_state import _amp_state, warn_or_err
from ampfuse.compat.apex.amp.handle import AmpHandle, NoOpHandle
from ampfuse.compat.apex.amp.scaler import LossScaler
from ampfuse.compat.apex.amp.stash import add_stash


class Properties(types.SimpleNamespace):
    """The options in force, as attributes; ``options`` is the dict behind them."""

    options = property(vars)

    def __init__(self) -> None:
        super().__init__(
            enabled=False,
            opt_level=None,
            cast_model_type=None,
            patch_torch_functions=False,
            patch_torch_functions_type=None,
            keep_batchnorm_fp32=None,
            master_weights=None,
            loss_scale=1.0,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            raise AttributeError(f"amp has no property {name!r}; it has {list(self.options)}")
        super().__setattr__(name, value)


class _Level:
    """Fills a :class:`Properties` with the defaults of a level."""

    level: policies.Policy
    brief: str
    more: str

    def __call__(self, properties: Properties) -> Properties:
        return _filled(properties, self.level)


def _filled(properties: Properties, policy: policies.Policy) -> Properties:
    for name in properties.options:
        setattr(properties, name, True if name == "enabled" else getattr(policy, name))
    return properties


def _level(name: str) -> type[_Level]:
    level = policies.LEVELS[name]
    brief = f"{name}: {level.brief}"
    return type(name, (_Level,), {"level": level, "brief": brief, "more": level.brief})


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


def initialize(
    models: nn.Module | list[nn.Module],
    optimizers: Optimizer | list[Optimizer] | None = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    patch_torch_functions_type: torch.dtype | None = None,
) -> Any:
    """:func:`ampfuse.amp.initialize` with apex's arguments, by position too.

    At O1 and O4 autocast stays on outside ``forward`` too, see
    :func:`ampfuse.amp.cast_everywhere`. With ``verbosity=1`` each overflow is printed, in apex's
    words.

    Returns:
        ``models`` if `optimizers` is None, else ``(models, optimizers)``, in the shape given.

    Raises:
        RuntimeError: as ampfuse's; also an ``FP16_Optimizer``. Warnings instead, for contradictory
            options, if ``_amp_state.hard_override`` is set.
        TypeError, ValueError, AssertionError: as ampfuse's.

    Source: ``apex.amp.initialize``; O4 and O5 from ROCm/apex.
    """
    given, properties = locals(), Properties()
    _amp_state.opt_properties = properties
    _amp_state.verbosity = verbosity
    if not enabled:
        _amp_state.handle = NoOpHandle()
        return turn_off(models, optimizers, sessions.Session(policy=None, verbosity=verbosity))

    level = policies.make_policy(opt_level, cast_model_outputs=cast_model_outputs)
    options = [name for name in properties.options if name not in ("enabled", "opt_level")]
    policy = _overridden(level, {n: given[n] for n in options if given[n] is not None})
    _filled(properties, policy)
    _refuse_fp16_optimizers(optimizers)
    if not (isinstance(num_losses, int) and num_losses >= 1):
        raise ValueError(f"num_losses must be an integer of at least 1, not {num_losses!r}.")

    scalers = [
        LossScaler(policy.loss_scale, min_loss_scale=min_loss_scale, max_loss_scale=max_loss_scale)
        for _ in range(num_losses)
    ]
    session = sessions.Session(policy, list(scalers), verbosity, everywhere=True)
    allow_half = _amp_state.allow_incoming_model_not_fp32 or _amp_state.hard_override
    result = set_up(models, optimizers, session, allow_half=allow_half)

    _amp_state.min_loss_scale, _amp_state.max_loss_scale = min_loss_scale, max_loss_scale
    casts = policy.autocast_type is not None
    if casts:
        patches.install()
    _amp_state.handle = AmpHandle(session, _as_list(models)) if casts else NoOpHandle()
    for optimizer in _as_list(optimizers):
        add_stash(optimizer)
    return result


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _refuse_fp16_optimizers(optimizers: Any) -> None:
    from ampfuse.compat.apex.fp16_utils import FP16_Optimizer

    for optimizer in _as_list(optimizers):
        if isinstance(optimizer, FP16_Optimizer):
            raise RuntimeError(
                "amp.initialize makes FP32 masters and scales the loss itself, and so does "
                "FP16_Optimizer: give it the optimizer inside (fp16_optimizer.optimizer, made "
                "anew), or keep FP16_Optimizer and leave amp out."
            )
