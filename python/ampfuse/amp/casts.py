"""Make a model compute at its level: cast its weights, its inputs and its outputs.

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
import math
import types
import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ampfuse import _core, pytree
from ampfuse.amp import cast_state, float32_output
from ampfuse.amp.cast_state import casts_are_disabled
from ampfuse.amp.policy import Policy
from ampfuse.nn.fuse.forwards import WrappedForward, is_proxy, original_class
from ampfuse.nn.fuse.forwards import eager_module as eager_module
from ampfuse.optim.sharding import is_sharded, local
from ampfuse.torch_utils import HALF_DTYPES, outside_dynamo, skip_frames


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
        cast_state.note_forward()
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


@torch.no_grad()
def cast_model(model: nn.Module, dtype: torch.dtype, *, keep_batchnorm_fp32: bool) -> None:
    """Cast the floating point parameters, their gradients and the buffers of `model`, in place.

    The Parameter objects stay (only their ``data`` changes), so optimizers that hold them stay
    valid. With `keep_batchnorm_fp32`, batch norms that have weights (``SyncBatchNorm`` too) become
    FP32 with their running statistics; layer, group and instance norms are cast, as in apex.
    torch's loss modules stay FP32, with their class weights, and cast their inputs: losses overflow
    in half precision, and their inputs are half if they come from inside the model, FP32 otherwise.
    """
    for module in model.modules():
        if _is_loss(module):
            install(module, Casts(inputs=torch.float32))
        to = torch.float32 if _stays_float32(module, keep_batchnorm_fp32) else dtype
        cast_own_parameters(module, to)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype != to:
                module._buffers[name] = buffer.to(to)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def _stays_float32(module: nn.Module, keep_batchnorm_fp32: bool) -> bool:
    return _is_loss(module) or (keep_batchnorm_fp32 and is_affine_batch_norm(module))


def warn_of_range(model: nn.Module, policy: Policy) -> None:
    """Warn of finite parameters that become inf when cast to float16. Waits once."""
    largest = {
        f"{prefix}.{name}" if prefix else name: torch.linalg.vector_norm(
            local(param).detach(), math.inf
        )
        for prefix, module in eager_module(model).named_modules()
        if not _stays_float32(module, bool(policy.keep_batchnorm_fp32))
        for name, param in module._parameters.items()
        if param is not None
        and param.is_floating_point()
        and local(param).numel()
        and not param.is_meta
    }
    if not largest:
        return
    home = next(iter(largest.values())).device
    values = torch.stack([norm.to(home, torch.float64) for norm in largest.values()]).tolist()
    lost = [f"{k!r} ({v:g})" for k, v in zip(largest, values, strict=True) if 65520 <= v < math.inf]
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        warnings.warn(
            f"{policy.opt_level} casts weights to float16, whose largest number is 65504, so the "
            f"largest values become inf in {', '.join(lost[:3])}{more}. Use O5 or O4, whose BF16 "
            "has FP32's range, or rescale these weights before amp.initialize.",
            stacklevel=4,
        )


def cast_own_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast `module`'s floating point parameters and their gradients, not its children's."""
    for parameter in module._parameters.values():
        if parameter is None or not parameter.is_floating_point() or parameter.dtype == dtype:
            continue
        gradient, parameter.grad = parameter.grad, None
        if is_sharded(parameter):  # as module.to() does it, so that FSDP finds the new shard
            cast = torch.nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, cast)
        else:
            parameter.data = _core.C.empty_laid_out_as(parameter, dtype).copy_(parameter.data)
        if gradient is not None:
            parameter.grad = gradient.to(dtype)


def is_affine_batch_norm(module: nn.Module) -> bool:
    """True for a batch norm (``SyncBatchNorm`` too) that has weights."""
    if isinstance(module, torch.jit.ScriptModule):  # all of one class, which remembers a name
        return "BatchNorm" in module.original_name and "weight" in module._parameters
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine


def _is_loss(module: nn.Module) -> bool:
    """Whether it is a loss module of torch's kind without modules of its own."""
    return isinstance(module, nn.modules.loss._Loss) and not module._modules


def save_in_float32(model: nn.Module) -> None:
    """Make ``state_dict()`` of `model` and of its parts return FP32 copies of half entries.

    Checkpoints then do not depend on the level. ``load_state_dict`` casts back.
    """
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):  # takes no hooks; its parent's covers it
            continue
        if _state_dict_in_float32 not in module._state_dict_hooks.values():
            module.register_state_dict_post_hook(_state_dict_in_float32)


# A function of this module, not a closure: it pickles and deep-copies with the model it hangs on.
def _state_dict_in_float32(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Replace half entries: the module's own and, as its children have hooks, scripted ones."""
    is_watched = False
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, own in tensors:
        entry = state_dict.get(prefix + name)
        # keep_vars=True asks for the parameter itself.
        if isinstance(entry, Tensor) and entry.dtype in HALF_DTYPES and entry is not own:
            state_dict[prefix + name] = copy = entry.float()
            if not is_watched and copy.numel() <= _WATCHED and not copy.is_inference():
                is_watched = True
                _warn_if_written(module, own)
                _latest_copy[module] = copy.detach(), own._version


# For a module, the latest state dict's copy of one small weight, and the version of that weight.
_latest_copy: WeakKeyDictionary[nn.Module, tuple[Tensor, int]] = WeakKeyDictionary()
_WATCHED = 1 << 16


def _warn_if_written(module: nn.Module, weight: Tensor) -> None:
    """Warn if the latest copy was written to, as if it were the weight, and nothing was loaded."""
    copy, version = _latest_copy.pop(module, (None, -1))
    if copy is not None and copy._version > 0 and weight._version == version:
        warnings.warn(
            f"Writing into the state_dict() of this {type(module).__name__} has no effect: it "
            "holds FP32 copies of the half-precision weights. A moving average of an initialized "
            "model (timm's ModelEmaV3) therefore never changes: use the optimizer's ema_decay= and "
            "swap_ema(), or create the average before amp.initialize. Otherwise pass the changed "
            "state dict to load_state_dict.",
            stacklevel=2,
        )
