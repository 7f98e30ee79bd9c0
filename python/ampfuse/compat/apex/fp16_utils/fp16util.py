"""``apex.fp16_utils.fp16util``: cast models, and move values between model and master weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampfuse.amp.casts import cast_model, cast_own_parameters, is_affine_batch_norm
from ampfuse.compat.apex.apex_C import flatten, unflatten

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
    """`network`, cast to float16 in place but for batch norm, behind a cast of its input."""
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
    """`network` in float16 (batch norm in float32) behind a cast of all its inputs.

    The output stays float16.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.half)

    def forward(self, *inputs: Tensor) -> Any:
        return self.network(*(value.half() for value in inputs))


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """The trainable parameters of `model`, and float32 masters of them.

    With `flat_master` the master is one flat parameter of all concatenated, its ``.grad`` zeros.
    """
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
    """Copy the model's gradients into the masters', casting.

    A master gets no gradient where the model has none; a flat master gets zeros there.
    """
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
