"""The weights of a model at its level: half precision in memory, FP32 in state dicts."""

from __future__ import annotations

import math
import warnings
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ampfuse import _core
from ampfuse.amp.casts import Casts, install
from ampfuse.amp.policy import Policy
from ampfuse.optim.sharding import is_sharded, local
from ampfuse.torch_utils import HALF_DTYPES, eager_module


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
            stacklevel=5,
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


# ---- state dicts ---------------------------------------------------------------------------------


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
