"""Have torch's functions cast their arguments by the rules in force where they are called.

As apex did, attributes are replaced: of ``torch``, ``torch.nn.functional``, ``torch.Tensor`` and
their like. That reaches every thread and every caller, and costs a function without a rule nothing;
a function mode would see each call of any function, at several times the price. Where no rules are
in force (see :mod:`~ampfuse.amp.cast_state`) a replaced function does what the original does.

Who does not look the attribute up is not reached: ``from torch.nn.functional import mse_loss`` in a
module imported before the first :func:`install`, and what ``torch.jit.script`` or ``torch.compile``
compiled.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.nn.modules import rnn

from ampfuse import trees
from ampfuse.amp import cast_state
from ampfuse.amp.half_output import HalfOutput
from ampfuse.amp.op_rules import RNN_LAYERS, Arguments, OpRules, Rule
from ampfuse.amp.replacements import Replacements

_OWNERS: tuple[Any, ...] = (
    Tensor,
    nn.functional,
    torch,
    torch._VF,
    torch.linalg,
    torch.special,
)
# They check types, or take a fused way, before they come to a function that is replaced.
_LAYERS = (
    nn.GRU,
    nn.LSTM,
    nn.MultiheadAttention,
    nn.RNN,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
)

_lock = threading.RLock()
_replaced = Replacements()
_installed: dict[int, OpRules] = {}  # by id


def install(rules: OpRules) -> None:
    """Replace the functions that `rules` has names for, where they are not replaced already."""
    if id(rules) in _installed:
        return
    with _lock:
        # Compiled code calls the originals, and half outputs override those: by a list that is made
        # once, and now.
        torch.overrides.get_overridable_functions()
        for owner in _OWNERS:
            for name in rules.table:
                function = getattr(owner, name, None)
                if callable(function) and not isinstance(function, type):
                    _replace(owner, name, functools.partial(_casting, name))
        for layer in _LAYERS:
            _replace(layer, "forward", _under_autocast)
        _replace(rnn, "_rnn_impls", _casting_all)
        _replace(torch.jit, "script", _scripting)
        _installed[id(rules)] = rules


def remove() -> None:
    """Undo every :func:`install`, where nobody else has replaced the function since."""
    with _lock:
        _replaced.put_back()
        _installed.clear()


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    if (owner, name) in _replaced:
        return
    replacement = make(getattr(owner, name))
    if callable(replacement):
        # By these pickle finds the replacement or, in a process without amp, the original.
        in_class = isinstance(owner, type)
        replacement.__module__ = owner.__module__ if in_class else owner.__name__
        replacement.__qualname__ = f"{owner.__qualname__}.{name}" if in_class else name
    _replaced.replace(owner, name, replacement)


def _casting(name: str, function: Any) -> Any:
    """`function`, with its arguments cast by the rule that the scope in force has for `name`."""
    call = _without_cpu_autocast(function) if name in RNN_LAYERS else function

    @functools.wraps(function)
    def cast_first(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():  # it follows autocast, and must not see what is below
            return function(*args, **kwargs)
        scope = cast_state.thread.scope or cast_state.outside
        rule = scope.table.get(name)
        if rule is None or is_compiling():
            return function(*args, **kwargs)
        if not scope.casts_cpu and _all_on_cpu(args, kwargs):
            return function(*args, **kwargs)
        cast, kwargs = _apply(rule, scope.dtype, args, kwargs)
        return call(*cast, **kwargs)

    # What Dynamo takes in its place, also in the list of functions that it knows by name.
    cast_first._torchdynamo_inline = function  # type: ignore[attr-defined]
    return cast_first


def _apply(rule: Rule, dtype: torch.dtype | None, args: Any, kwargs: Any) -> Arguments:
    assert dtype is not None
    if args and isinstance(args[0], HalfOutput):
        with DisableTorchFunctionSubclass():  # its own rules take time and do the same
            return rule(dtype, args, kwargs)
    return rule(dtype, args, kwargs)


def _all_on_cpu(args: Any, kwargs: Any) -> bool:
    if args and isinstance(args[0], Tensor) and not args[0].is_cpu:  # the common case, quickly
        return False
    return all(tensor.is_cpu for tensor in trees.tensors((args, kwargs)))


def _casting_all(functions: dict[str, Any]) -> dict[str, Any]:
    return {key: _casting(function.__name__, function) for key, function in functions.items()}


def _without_cpu_autocast(function: Any) -> Any:
    """Under autocast ampfuse runs recurrent layers in FP32 on the CPU, where torch raises."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return call


def _under_autocast(forward: Any) -> Any:
    @functools.wraps(forward)
    def with_autocast(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return forward(self, *args, **kwargs)
        scope = cast_state.scope()
        tensor = next(trees.tensors((args, kwargs)), None) if scope.table else None
        if tensor is None or (tensor.is_cpu and not scope.casts_cpu):
            return forward(self, *args, **kwargs)
        device_type = tensor.device.type
        available = torch.amp.is_autocast_available(device_type)
        if not available or torch.is_autocast_enabled(device_type):
            return forward(self, *args, **kwargs)
        with torch.autocast(device_type, dtype=scope.dtype):
            return forward(self, *args, **kwargs)

    return with_autocast


def _scripting(script: Any) -> Any:
    @functools.wraps(script)
    def with_originals(*args: Any, **kwargs: Any) -> Any:
        kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 1  # it looks into its caller
        with _lock, _replaced.put_aside():  # it knows torch's functions by identity
            return script(*args, **kwargs)

    return with_originals
