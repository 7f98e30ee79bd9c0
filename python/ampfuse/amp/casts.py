"""Make a model's ``forward`` compute at its level: cast its inputs and its outputs.

The model stays the user's object. Its class is exchanged for a subclass of that class whose
``forward`` casts around the original one. Unlike a method attached to the instance, a method of the
class is right for every copy: ``copy.deepcopy`` (teacher models), pickle, ``DataParallel`` replicas
and ``torch.compile`` all work, and so does calling ``forward`` directly. A proxy object keeps its
class: the module that it wraps gets the casts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ampfuse import pytree
from ampfuse.amp import cast_state, float32_output
from ampfuse.amp.cast_state import casts_are_disabled
from ampfuse.amp.policy import Policy
from ampfuse.torch_utils import (
    WrappedForward,
    eager_module,
    is_proxy,
    original_class,
    outside_dynamo,
    skip_frames,
)


@dataclasses.dataclass(frozen=True)
class Casts:
    """The casts that ``forward`` makes around the original; None: no cast."""

    inputs: torch.dtype | None = None
    autocast: torch.dtype | None = None
    outputs: torch.dtype | None = None
    lazy_outputs: bool = False  # half ones become FP32, see float32_output.py

    @classmethod
    def of(cls, policy: Policy) -> Casts:
        """Outputs are FP32, unless the policy says otherwise."""
        inputs, outputs = policy.weights_type, policy.cast_model_outputs
        lazy = outputs is None and policy.computes_in_half
        if inputs is not None and outputs is None:
            outputs = torch.float32
        return cls(inputs, policy.autocast_type, outputs, lazy)


def check_can_install(model: nn.Module) -> None:
    """Raise TypeError if the ``forward`` of `model` cannot be exchanged (a ``ScriptModule``)."""
    model = eager_module(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "amp.initialize does not support a ScriptModule. Call it on the original module, then "
            "use torch.compile or torch.jit.trace on what it returns."
        )
    if is_proxy(model):
        raise TypeError(
            f"{type(model).__name__} is a proxy whose modules() does not start with an nn.Module. "
            "Call amp.initialize on the module that it wraps."
        )


def is_installed(model: nn.Module) -> bool:
    """Whether :func:`install` was called on `model` before."""
    return issubclass(type(eager_module(model)), AmpModule)


def install(model: nn.Module, casts: Casts) -> None:
    """Make `model`'s ``forward`` apply `casts`, in place. A second call replaces the casts."""
    module = eager_module(model)
    if not is_installed(module):
        # A forward set on the instance would hide the class's; ours calls it instead.
        if "forward" in module.__dict__:
            module.__dict__["_amp_inner_forward"] = module.__dict__.pop("forward")
        _exchange_class(module)
    module.__dict__["_amp_casts"] = casts


def _exchange_class(module: nn.Module) -> None:
    """``module.__class__ = ...``, also if the class defines ``__class__`` or ``__setattr__``."""
    original: Any = type(module)
    vars(object)["__class__"].__set__(module, _amp_class(original))


class AmpModule(WrappedForward):
    """Mixed into a model's class by :func:`install`, which ``isinstance`` can detect."""

    _amp_casts: Casts

    def __setstate__(self, state: Any) -> None:  # of copies: deepcopy and pickle
        super().__setstate__(state)  # type: ignore[misc]
        # A bound method pickles as its name, by which a pickle finds the one that casts.
        inner = self.__dict__.get("_amp_inner_forward")
        if getattr(inner, "__func__", None) is type(self).forward:  # type: ignore[attr-defined]
            del self.__dict__["_amp_inner_forward"]

    def __prepare_scriptable__(self) -> Any:
        """Hook that ``torch.jit.script`` calls first.

        Raises:
            TypeError: always. Scripting the original ``forward`` would lose the casts silently.
        """
        raise TypeError(
            f"torch.jit.script cannot compile the casts around {type(self).__name__}.forward. Use "
            "torch.compile(model) or torch.jit.trace(model, inputs); or script parts of the model "
            "before amp.initialize; or script a new model and load this one's state_dict()."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle finds classes by name, and this one's name is the original's: rebuild an instance
        # of the original, then exchange its class. The rest of the state travels as always.
        make, args, *state = super().__reduce_ex__(protocol)  # type: ignore[str-unpack]
        original = original_class(type(self))
        args = tuple(original if arg is type(self) else arg for arg in args)
        return (_restore, (make, args, self.__dict__.get("_amp_casts")), *state)


def _restore(make: Callable[..., nn.Module], args: tuple[Any, ...], casts: Casts) -> nn.Module:
    model = make(*args)
    _exchange_class(model)
    model.__dict__["_amp_casts"] = casts
    return model


@functools.cache
def _amp_class(original: Any) -> Any:
    """The subclass of `original` that casts; its name, signature and docstring are `original`'s."""

    def compute(inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    @functools.wraps(original.forward)  # inspecting the signature of forward finds the model's
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = self.__dict__.get("_amp_inner_forward") or super(amp_class, self).forward
        casts = self.__dict__.get("_amp_casts")
        if casts is None:  # made by `type(model)(...)`, not by initialize
            return inner(*args, **kwargs)
        if torch.compiler.is_compiling():  # a part of a larger graph
            return _cast_forward(casts, self, inner, args, kwargs)
        # In a compiled model the original forward is compiled, and the casts around it are not:
        # the graph returns half tensors.
        return outside_dynamo(
            lambda compiled: _cast_forward(casts, self, compiled, args, kwargs),
            functools.partial(compute, inner),
        )

    # torch.compile counts recompilations per code object and gives up at eight, so each class gets
    # its own code object, as it has without amp.
    compute.__code__ = compute.__code__.replace()
    forward.__code__ = forward.__code__.replace()  # type: ignore[attr-defined]
    skip_frames(forward, and_callees=False)

    def body(namespace: dict[str, Any]) -> None:
        namespace["forward"] = forward
        for name in ("__module__", "__qualname__", "__doc__"):
            namespace[name] = getattr(original, name)

    amp_class: Any = types.new_class(original.__name__, (AmpModule, original), exec_body=body)
    return amp_class


def _cast_forward(
    casts: Casts,
    model: nn.Module,
    inner: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if casts.inputs is not None:
        args, kwargs = pytree.cast(args, casts.inputs), pytree.cast(kwargs, casts.inputs)

    if casts.autocast is None or casts_are_disabled():
        covered = False
        with cast_state.off_if_everywhere():
            outputs = inner(*args, **kwargs)
    else:
        cast_state.mark_forward()
        device_type = _device_type(model, (args, kwargs))
        # In a user's autocast region, or inside another model, the loss is covered already.
        covered = torch.is_autocast_enabled(device_type) and not cast_state.thread.everywhere
        with cast_state.inside_forward(device_type, casts.autocast):
            outputs = inner(*args, **kwargs)
    if casts.lazy_outputs and not covered:
        outputs = float32_output.widen(outputs, model)
    return outputs if casts.outputs is None else pytree.cast(outputs, casts.outputs)


def _device_type(model: nn.Module, arguments: Any) -> str:
    """The device type of the model: of its weights or, for DataParallel's replicas, its inputs."""
    weights = itertools.chain(model.parameters(), model.buffers())
    first = next(weights, None)
    if first is None:
        first = next(pytree.tensors(arguments), None)
    return "cpu" if first is None else first.device.type
