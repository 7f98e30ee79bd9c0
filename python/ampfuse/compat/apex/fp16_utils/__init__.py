"""``apex.fp16_utils``: half models, master weights and loss scaling by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampfuse.amp.weights import cast_model, cast_own_parameters, is_affine_batch_norm
from ampfuse.compat.apex.apex_C import flatten, unflatten
from ampfuse.compat.apex.fp16_utils.fp16_optimizer import FP16_Optimizer

__all__ = [
    "BN_convert_float", "DynamicLossScaler", "FP16Model", "FP16_Optimizer", "LossScaler",
    "clip_grad_norm", "convert_module", "convert_network", "master_params_to_model_params",
    "model_grads_to_master_grads", "network_to_half", "prep_param_lists", "to_python_float",
    "tofp16",
]  # fmt: skip

clip_grad_norm = nn.utils.clip_grad_norm_


class tofp16(nn.Module):
    """Casts its input, a tensor, to float16."""

    def forward(self, input: Tensor) -> Tensor:
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Make the batch norms of `module` that have weights float32, in place; return `module`."""
    for part in module.modules():
        if is_affine_batch_norm(part):
            part.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """`network`, cast to float16 in place except for batch norm, after a cast of its input."""
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


@torch.no_grad()
def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast `module`'s own floating point parameters, gradients and buffers, not its children's."""
    cast_own_parameters(module, dtype)
    for buffer in module._buffers.values():
        if buffer is not None and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast `network` to `dtype` in place, but for batch norms that have weights; return it."""
    cast_model(network, dtype, keep_batchnorm_fp32=True)
    return network


class FP16Model(nn.Module):
    """`network` in float16 (batch norm in float32), after a cast of its inputs; float16 out."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.half)

    def forward(self, *inputs: Tensor) -> Any:
        return self.network(*(value.half() for value in inputs))


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """The trainable parameters of `model`, and float32 masters of them; or a flat one of all."""
    model_params: list[Tensor] = [param for param in model.parameters() if param.requires_grad]
    masters = [param.detach().clone().float() for param in model_params]
    if flat_master:
        flat = nn.Parameter(torch.cat([master.reshape(-1) for master in masters]))
        flat.grad = torch.zeros_like(flat)
        return model_params, [flat]
    return model_params, [master.requires_grad_() for master in masters]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the model's gradients into the masters', casting; a flat one has zeros for None."""
    if flat_master:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        master_params[0].grad = flatten(grads).to(master_params[0].dtype)
        return
    for model, master in zip(model_params, master_params, strict=True):
        if model.grad is None:
            master.grad = None
        elif master.grad is None:
            master.grad = model.grad.detach().to(master.dtype, copy=True)
        else:
            master.grad.copy_(model.grad)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the masters' values into the model, rounding to its type."""
    if flat_master:
        master_params = unflatten(master_params[0], model_params)
    for model, master in zip(model_params, master_params, strict=True):
        model.copy_(master)


def to_python_float(t: Any) -> float:
    """The value of a one-element tensor, or the first item of a sequence."""
    return t.item() if hasattr(t, "item") else t[0]


class LossScaler:
    """A static scale, which never sees an overflow; another class than ``apex.amp.scaler``'s."""

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        return False

    def update_scale(self, overflow: bool) -> None:
        """The scale stays."""

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def scale_gradient(self, module: Any, grad_in: Any, grad_out: Any) -> tuple[Any, ...]:
        """`grad_in` times the scale, as a backward hook returns it."""
        return tuple(None if g is None else self.loss_scale * g for g in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Backward of ``loss * loss_scale``."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """An overflow divides the scale by `scale_factor`, down to 1; `scale_window` clean passes
    multiply it."""

    def __init__(
        self, init_scale: float = 2**32, scale_factor: float = 2.0, scale_window: int = 1000
    ) -> None:
        self.cur_scale, self.cur_iter, self.last_overflow_iter = init_scale, 0, -1
        self.scale_factor, self.scale_window = scale_factor, scale_window

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return whether a gradient of `params` holds inf or NaN. Synchronizes once."""
        checks = [p.grad.isfinite().all() for p in params if p.grad is not None]
        return bool(checks) and not torch.stack([c.to(checks[0].device) for c in checks]).all()

    _has_inf_or_nan = staticmethod(lambda x: not bool(x.isfinite().all()))

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, 1)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1
