"""The optimizer steps of ``amp_C``, on lists of tensors.

Types of optimizers are those that apex's had, or bfloat16 where it took float16; there is no
float64. Arithmetic is FP32. The flag, where an optimizer reads it, stops everything. `mode` is 0
for weight decay through the gradient and 1 for decoupled decay.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor

from ampfuse import _core, ops
from ampfuse._schema import ALGORITHMS
from ampfuse.compat.apex.multi_tensor_apply import (
    Lists,
    TensorLists,
    checked,
    set_flag,
    typed_rows,
)

# The lists of the operations: gradients, parameters, half weights that receive these (models), a
# place for updates, and the states of the algorithm. The values are types, see `typed_rows`.
_GRADS, _MOMENTS = {"grads": "grads"}, ("exp_avg", "exp_avg_sq")
_ADAM = _GRADS | {"params": "params"} | dict.fromkeys(_MOMENTS, "float32")
_ADAM_MASTER = _GRADS | {"models": "models"} | dict.fromkeys((*_MOMENTS, "params"), "float32")
_LAMB = _GRADS | dict.fromkeys(("params", *_MOMENTS), "grads")
_LAMB_MASTER = _GRADS | dict.fromkeys(("params", *_MOMENTS), "float32") | {"models": "models"}
_LAMB_UPDATE = _GRADS | dict.fromkeys(("params", *_MOMENTS), "params") | {"updates": "updates"}
_SGD = _GRADS | dict.fromkeys(("params", "momentum_buffer"), "grads")
_SGD_MASTER = _GRADS | dict.fromkeys(("params", "momentum_buffer"), "float32") | {"models": "half"}


def multi_tensor_sgd(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, weight_decay: float,
    momentum: float, dampening: float, lr: float, nesterov: bool, first_run: bool,
    wd_after_momentum: bool, scale: float,
) -> None:  # fmt: skip
    """SGD on (gradients, parameters, momentum buffers[, half model weights]). Reads the flag.

    Gradients are multiplied by `scale`. In `first_run` the buffers become the gradients.
    """
    lists = typed_rows("multi_tensor_sgd", tensor_lists, _SGD, _SGD_MASTER)
    grads, params, stop = lists["grads"], lists["params"], (noop_flag != 0).float()
    run = functools.partial(
        _step, "sgd", step=1 if first_run else 2, stop=stop, lr=lr, momentum=momentum,
        dampening=dampening, nesterov=nesterov,
    )  # fmt: skip
    if all(p.dtype == torch.float32 for p in params):
        run(
            lists, loss_scale=1 / _floats(scale, lists), weight_decay=weight_decay,
            wd_after_momentum=wd_after_momentum,
        )  # fmt: skip
        return
    # apex rounds the step to the type of half parameters before adding it. So the step is made in
    # FP32, from the decay on where that comes late, and rounded as half weights of masters are.
    late = -lr * weight_decay if wd_after_momentum else 0.0
    step = [p.float() * late if late else torch.zeros_like(p, dtype=torch.float32) for p in params]
    scaled = [torch.empty_like(t) for t in step]
    early = 0.0 if wd_after_momentum else weight_decay
    if early:
        checked(ops.axpby, grads, params, scaled, scale, early)
    else:
        checked(ops.scale, grads, scaled, scale)
    rounded = [torch.zeros_like(p) for p in params]
    run(lists | {"grads": scaled, "params": step, "models": rounded})
    torch._foreach_add_(params, rounded)


def multi_tensor_adam(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, lr: float, beta1: float,
    beta2: float, eps: float, step: int, mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """Adam on (gradients, parameters, exp_avg, exp_avg_sq); the last two are float32."""
    lists = typed_rows("multi_tensor_adam", tensor_lists, _ADAM)
    _step(
        "adam", lists, step=step, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay,
        decoupled_weight_decay=mode, bias_correction=bias_correction,
    )  # fmt: skip


def multi_tensor_adam_capturable(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, lr: Tensor, beta1: float,
    beta2: float, eps: float, step: Tensor, mode: int, bias_correction: int, weight_decay: float,
    inv_scale: Tensor,
) -> None:  # fmt: skip
    """:func:`multi_tensor_adam` with `lr`, `step` and `inv_scale` on the device.

    The gradients are multiplied by `inv_scale`, also where they are. A flag of 1 stops it.
    """
    lists = typed_rows("multi_tensor_adam_capturable", tensor_lists, _ADAM)
    _capturable_adam(
        noop_flag, lists, inv_scale, step=step, lr=lr, betas=(beta1, beta2), eps=eps,
        weight_decay=weight_decay, decoupled_weight_decay=mode, bias_correction=bias_correction,
    )  # fmt: skip


def multi_tensor_adam_capturable_master(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, lr: Tensor, beta1: float,
    beta2: float, eps: float, step: Tensor, mode: int, bias_correction: int, weight_decay: float,
    inv_scale: Tensor,
) -> None:  # fmt: skip
    """Like :func:`multi_tensor_adam_capturable`, on float32 masters, which are the fifth list.

    The parameters receive the rounded masters.
    """
    lists = typed_rows("multi_tensor_adam_capturable_master", tensor_lists, _ADAM_MASTER)
    _capturable_adam(
        noop_flag, lists, inv_scale, step=step, lr=lr, betas=(beta1, beta2), eps=eps,
        weight_decay=weight_decay, decoupled_weight_decay=mode, bias_correction=bias_correction,
    )  # fmt: skip


def _capturable_adam(noop_flag: Tensor, lists: Lists, inv_scale: Tensor, **options: Any) -> None:
    grads, inverse, stop = lists["grads"], _floats(inv_scale, lists), (noop_flag == 1).float()
    _step("adam", lists, loss_scale=1 / inverse, stop=stop, **options)
    checked(ops.unscale, grads, grads, torch.where(stop > 0, torch.ones_like(inverse), inverse))


def multi_tensor_adagrad(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, lr: float, eps: float,
    mode: int, weight_decay: float,
) -> None:  # fmt: skip
    """Adagrad on (gradients, parameters, sums of squares)."""
    types = dict.fromkeys(("grads", "params", "sum"), "grads")
    lists = typed_rows("multi_tensor_adagrad", tensor_lists, types)
    _step(
        "adagrad", lists, lr=lr, eps=eps, weight_decay=weight_decay, decoupled_weight_decay=mode
    )  # fmt: skip


def multi_tensor_novograd(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, grad_norms: Tensor, lr: float,
    beta1: float, beta2: float, eps: float, step: int, bias_correction: int, weight_decay: float,
    grad_averaging: int, mode: int, norm_type: int,
) -> None:  # fmt: skip
    """NovoGrad on (gradients, parameters, exp_avg). Sets the flag for gradients not finite.

    `grad_norms` (float32, one for each tensor) are the averages of norms, advanced in place; with
    bias correction they are corrected wherever they started. `norm_type`: 2, or 0 for the maximum.
    `mode` 0: norms and decay act on the gradient, before the moment; 1: on the moment.
    """
    types = dict.fromkeys(("grads", "params", "exp_avg"), "grads")
    lists = typed_rows("multi_tensor_novograd", tensor_lists, types)
    if norm_type not in (0, 2):
        problem = f"norm_type must be 0 (maximum) or 2, not {norm_type}"
        raise RuntimeError(f"multi_tensor_novograd: {problem}")
    # An average that started at the first norm would not be corrected without init_zero.
    _step(
        "novograd", lists, step=step, norm_averages=grad_norms.detach(), lr=lr,
        betas=(beta1, beta2), eps=eps, weight_decay=weight_decay, bias_correction=bias_correction,
        grad_averaging=grad_averaging, reg_inside_moment=1 - mode, norm_type=norm_type,
        init_zero=True,
    )  # fmt: skip
    _norms(noop_flag, lists["grads"])


def multi_tensor_lamb(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, lr: float, beta1: float,
    beta2: float, eps: float, step: int, bias_correction: int, weight_decay: float,
    grad_averaging: int, mode: int, global_grad_norm: Tensor, max_grad_norm: float,
    use_nvlamb: bool | None = False,
) -> None:  # fmt: skip
    """LAMB on (gradients, parameters, exp_avg, exp_avg_sq); leaves the update in the gradients.

    They are first divided by `global_grad_norm` / `max_grad_norm` if that is more than 1. Sets the
    flag for parameters and updates that are not finite.
    """
    lists = typed_rows("multi_tensor_lamb", tensor_lists, _LAMB)
    clip = _clip(lists, global_grad_norm, max_grad_norm)
    _lamb(
        noop_flag, lists, clip, lr, weight_decay, use_nvlamb, stop_on_flag=False, step=step,
        betas=(beta1, beta2), eps=eps, bias_correction=bias_correction,
        grad_averaging=grad_averaging, decoupled_weight_decay=mode,
    )  # fmt: skip


def multi_tensor_lamb_mp(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, lr: Tensor, beta1: float,
    beta2: float, eps: float, step: Tensor, bias_correction: int, weight_decay: float,
    grad_averaging: int, mode: int, global_grad_norm: Tensor, max_grad_norm: Tensor,
    use_nvlamb: bool | None, found_inf: Tensor, inv_scale: Tensor,
) -> None:  # fmt: skip
    """:func:`multi_tensor_lamb` with numbers on the device and, as a fifth list, half weights.

    Gradients are multiplied by `inv_scale` too. A flag that is set stops everything, and so does a
    parameter that is not finite; an update that is not finite has reached the moments, but does
    not reach the parameters. `found_inf` is ignored.
    """
    lists = typed_rows("multi_tensor_lamb_mp", tensor_lists, _LAMB, _LAMB_MASTER)
    clip = _clip(lists, global_grad_norm, max_grad_norm) / _floats(inv_scale, lists)
    _lamb(
        noop_flag, lists, clip, lr, weight_decay, use_nvlamb, stop_on_flag=True, step=step,
        betas=(beta1, beta2), eps=eps, bias_correction=bias_correction,
        grad_averaging=grad_averaging, decoupled_weight_decay=mode,
    )  # fmt: skip


def multi_tensor_lamb_stage1_cuda(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor_decay: Tensor,
    step: int, beta1: float, beta2: float, eps: float, global_grad_norm: Tensor,
    max_grad_norm: float,
) -> None:  # fmt: skip
    """LAMB's update, on (gradients, parameters, exp_avg, exp_avg_sq, updates).

    `step` counts the steps before this one. Reading the decays, which are decoupled,
    synchronizes with the device.
    """
    lists = typed_rows("multi_tensor_lamb_stage1_cuda", tensor_lists, _LAMB_UPDATE)
    _check_length("multi_tensor_lamb_stage1_cuda", lists, per_tensor_decay=per_tensor_decay)
    decays = per_tensor_decay.tolist()
    clip = _clip(lists, global_grad_norm, max_grad_norm)
    for decay in dict.fromkeys(decays):  # the kernel takes one per call
        has_it = [d == decay for d in decays]
        alike = {name: list(itertools.compress(tensors, has_it)) for name, tensors in lists.items()}
        _step(
            "lamb_update", alike, step=step + 1, loss_scale=clip, betas=(beta1, beta2), eps=eps,
            weight_decay=decay,
        )  # fmt: skip


def multi_tensor_lamb_stage2_cuda(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor, lr: float, weight_decay: float,
    use_nvlamb: bool | None = False,
) -> None:  # fmt: skip
    """LAMB's step, on (parameters, updates), by the ratios of the norms."""
    name, norms = "multi_tensor_lamb_stage2_cuda", (per_tensor_param_norm, per_tensor_update_norm)
    lists = typed_rows(name, tensor_lists, {"params": "params", "grads": "grads"})
    _check_length(name, lists, per_tensor_param_norm=norms[0], per_tensor_update_norm=norms[1])
    _step("sgd", lists, lr=_lamb_rates(lists, lr, weight_decay, use_nvlamb, *norms))


def _lamb(
    noop_flag: Tensor, lists: Lists, clip: Tensor, lr: Tensor | float, weight_decay: float,
    use_nvlamb: bool | None, *, stop_on_flag: bool, **options: Any,
) -> None:  # fmt: skip
    """Both halves of LAMB. `stop_on_flag`: stop if it is set on entry or on the way."""
    grads, params, models = lists["grads"], lists["params"], lists.pop("models", [])
    param_norms = _norms(noop_flag, params)
    stop = (noop_flag != 0).float() * stop_on_flag
    _step(
        "lamb_update", lists | {"updates": grads}, loss_scale=clip, stop=stop,
        weight_decay=weight_decay, **options,
    )  # fmt: skip
    norms = param_norms, _norms(noop_flag, grads)
    rates = _lamb_rates(lists, lr, weight_decay, use_nvlamb, *norms)
    stop = (noop_flag != 0).float() * stop_on_flag
    _step("sgd", {"grads": grads, "params": params, "models": models}, stop=stop, lr=rates)


def _step(
    algorithm: str, lists: Lists, *, step: Tensor | float = 1, loss_scale: Tensor | None = None,
    stop: Tensor | None = None, norm_averages: Tensor | None = None, **group: Any,
) -> None:  # fmt: skip
    """The kernels' step number `step`, on gradients divided by `loss_scale`.

    `group`: the options as a parameter group has them.
    """
    params, roles = lists["params"], ("grads", "params", "models", "updates")
    group.setdefault("decoupled_weight_decay", True)
    values = {hyper.name: hyper.of(group) for hyper in ALGORITHMS[algorithm].hypers}
    rates = None
    if isinstance(values["lr"], Tensor):
        rates, values["lr"] = _floats(values["lr"], lists), 0.0
    checked(
        _core.C.step,
        algorithm,
        lists["grads"],
        params,
        lists.get("models", []),
        [tensors for name, tensors in lists.items() if name not in roles],
        lists.get("updates", []),
        (_floats(step, lists) - 1).repeat(len(params)),  # the caller counts
        norm_averages,
        rates,
        values,
        loss_scale,
        stop,
    )


def _check_length(operation: str, lists: Lists, **per_tensor: Tensor) -> None:
    """Raise RuntimeError unless each of the tensors has an element for each row of the lists."""
    length = len(lists["params"])
    for name, values in per_tensor.items():
        if values.numel() != length:
            problem = f"{name} has {values.numel()} elements for {length} tensors"
            raise RuntimeError(f"{operation}: {problem}.")


def _floats(value: Tensor | float, lists: Lists) -> Tensor:
    """`value` as float32 of one dimension, on the device of the tensors."""
    device = lists["params"][0].device
    return torch.as_tensor(value, dtype=torch.float32, device=device).detach().reshape(-1)


def _norms(noop_flag: Tensor, tensors: list[Tensor]) -> Tensor:
    """The norm of each; the flag is set if one is not finite."""
    _, norms = checked(ops.l2norm, tensors, True)
    set_flag(noop_flag, ~norms.isfinite().all())
    return norms


def _clip(lists: Lists, norm: Tensor | float, largest: Tensor | float) -> Tensor:
    """The divisor of the gradients. A `largest` norm of 0 is not special: they become zero."""
    norm, largest = _floats(norm, lists), _floats(largest, lists)
    return torch.where(norm > largest, norm / largest, torch.ones_like(norm))


def _lamb_rates(
    lists: Lists, lr: Tensor | float, weight_decay: float, use_nvlamb: bool | None,
    param_norms: Tensor, update_norms: Tensor,
) -> Tensor:  # fmt: skip
    """The learning rate of each tensor, times its trust ratio if it has one."""
    norms, updates = _floats(param_norms, lists), _floats(update_norms, lists)
    ratios = torch.ones_like(norms)
    if use_nvlamb or weight_decay != 0:
        ratios = torch.where((norms != 0) & (updates != 0), norms / updates, ratios)
    return _floats(lr, lists) * ratios
