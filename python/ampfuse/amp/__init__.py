"""Mixed precision with apex's interface: ``initialize``, ``scale_loss`` and levels O0 to O5::

    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    ...
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

:mod:`~ampfuse.amp.policy` describes the levels. The loss scaler and the optimizers keep their state
on the device; the host waits for it only in functions that return its values.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import ampfuse as _ampfuse
from ampfuse import half_ops as _half_ops
from ampfuse.amp import function_casts as _function_casts
from ampfuse.amp import no_sync as _no_sync
from ampfuse.amp import session as _sessions
from ampfuse.amp.cast_state import disable_casts
from ampfuse.amp.function_casts import (
    bfloat16_function,
    float_function,
    half_function,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from ampfuse.amp.grad_scaler import GradScaler
from ampfuse.amp.initialize import initialize
from ampfuse.amp.scale_loss import scale_loss
from ampfuse.amp.scaler import LossScaler
from ampfuse.optim.param_groups import check_optimizer, parameters

if TYPE_CHECKING:
    from ampfuse.doctor import advise
    from ampfuse.insight import explain_overflow, memory_report

__all__ = [
    "GradScaler",
    "LossScaler",
    "advise",
    "bfloat16_function",
    "cast_everywhere",
    "clip_grad_norm_",
    "disable_casts",
    "explain_overflow",
    "float_function",
    "half_function",
    "initialize",
    "load_state_dict",
    "master_params",
    "memory_report",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "restore_torch",
    "scale_loss",
    "state_dict",
]


def __getattr__(name: str) -> Any:
    """The functions of layers above this one, which are imported at first use."""
    if name == "advise":
        return _ampfuse.doctor.advise
    if name in ("explain_overflow", "memory_report"):
        return getattr(_ampfuse.insight, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """The tensors that `optimizer` steps, in the order of its groups, FP32 masters among them.

    After ``scale_loss`` their ``.grad`` is the unscaled gradient, so this is the set to clip.
    Masters have followed what was loaded into the model, or edited in it, since the last step.

    Raises:
        TypeError: `optimizer` is not an optimizer, such as the model.
    """
    check_optimizer(optimizer, "amp.master_params(optimizer)")
    sync_masters_from_model = getattr(optimizer, "sync_masters_from_model", None)
    if sync_masters_from_model is not None:
        sync_masters_from_model()
    return parameters(optimizer)


def cast_everywhere() -> None:
    """Cast outside the models' ``forward`` too: in a ``loss()`` method, in a part called directly.

    If the latest ``initialize`` was at O1 or O4, autocast stays on in this thread until the next
    ``initialize``. At other levels, and with amp off, nothing changes. While the model is on a GPU,
    CPU tensors are not cast; nor are casts made in other processes. :func:`disable_casts` excepts a
    block. Backward passes in ``scale_loss`` and steps are always excepted.

    Raises:
        RuntimeError: ``initialize`` was not called.

    Source: the reach of ``apex.amp`` at O1.
    """
    _sessions.latest().everywhere = True
    _sessions.follow_latest()


def restore_torch() -> None:
    """Undo what ampfuse has changed in torch in this process, after a training.

    It turns off autocast that :func:`cast_everywhere` has left on in this thread, and restores
    functions that ``register_..._function`` replaced, ``DistributedDataParallel.no_sync``, and the
    CPU's kernels for half types (:func:`ampfuse.cpu_half_ops`). Later replacements by other code
    stay. Models and optimizers keep their level, and the next ``initialize`` replaces again what it
    needs. The page docs/what_it_changes.md has the whole list.
    """
    _sessions.end_everywhere()
    _function_casts.restore_registered()
    _no_sync.unwatch()
    _half_ops.reset()


def clip_grad_norm_(optimizer: Optimizer, max_norm: float) -> Tensor:
    """Clip the gradients of `optimizer` to `max_norm`, inside its next step.

    It rewrites no gradient and works at every level. Call it after ``scale_loss``, before ``step``.

    Returns:
        The norm of the unscaled gradients before clipping: float32, 0-dim, on the device.

    Raises:
        TypeError: `optimizer` is not an optimizer, such as the model's parameters.
    """
    check_optimizer(optimizer, "amp.clip_grad_norm_(optimizer, max_norm)")
    if hasattr(optimizer, "clip_next_step"):
        return optimizer.clip_next_step(max_norm)
    return torch.nn.utils.clip_grad_norm_(master_params(optimizer), max_norm)


def state_dict(
    destination: dict[str, Any] | None = None, *, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """The loss scalers' state: ``{"loss_scaler0": {"loss_scale": ..., "unskipped": ...}, ...}``.

    The scalers are those of the latest ``initialize``, or of the one that `optimizer` went through.
    The state is empty if amp is off, and written into `destination`, if that is given.
    Masters and moments are in ``optimizer.state_dict()``. Waits for the device.

    Raises:
        RuntimeError: ``initialize`` was not called.
    """
    state = OrderedDict() if destination is None else destination
    for index, scaler in enumerate(_session(optimizer).loss_scalers):
        state[f"loss_scaler{index}"] = scaler.state_dict()
    return state


def load_state_dict(state_dict: dict[str, Any], *, optimizer: Optimizer | None = None) -> None:
    """Restore what :func:`state_dict` returned, each scaler by its key. Does nothing if amp is off.

    Into the scalers of the latest ``initialize``, or of the one that `optimizer` went through.

    Whether a scale is dynamic comes from ``initialize``, not from here. A state with more or fewer
    scalers than ``initialize`` made is used as far as it goes, with a warning, as in apex.

    Raises:
        RuntimeError: `state_dict` is not the state of loss scalers.
        ValueError: a scale or a count that FP32 or int32 cannot hold. Nothing has changed then.
    """
    session = _session(optimizer)
    if not session.enabled:
        return
    if not isinstance(state_dict, Mapping):
        raise RuntimeError(
            "amp.load_state_dict needs the dict that amp.state_dict() returned, got "
            f"{type(state_dict).__name__}."
        )
    for key, state in state_dict.items():
        if not str(key).startswith("loss_scaler"):
            raise RuntimeError(
                f"Unexpected key {key!r}: the state that amp.state_dict() returns has only keys "
                "such as 'loss_scaler0'."
            )
        LossScaler.check_state(state, key)
    scalers = {f"loss_scaler{i}": scaler for i, scaler in enumerate(session.loss_scalers)}
    if scalers.keys() != state_dict.keys():
        warnings.warn(
            f"The amp state has {sorted(state_dict)}, but amp.initialize created {list(scalers)}: "
            "only those in both are restored.",
            stacklevel=2,
        )
    for key, scaler in scalers.items():
        if key in state_dict:
            scaler.load_state_dict(state_dict[key])


def _session(optimizer: Optimizer | None) -> _sessions.Session:
    return _sessions.latest() if optimizer is None else _sessions.of_optimizers([optimizer])
