"""The optimizers of ``amp_C``: one step on lists of tensors.

Gradients, parameters and states have the types that apex's had, or bfloat16 where it took float16;
there is no float64. Arithmetic is FP32. The flag, where an optimizer reads it, stops everything.
`mode` is 0 for weight decay through the gradient and 1 for decoupled decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ampfuse import _core, ops
from ampfuse.compat.apex.tensor_lists import TensorLists, checked, set_flag, typed_rows


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """SGD on (gradients, parameters, momentum buffers[, half model weights]). Reads the flag.

    Gradients are multiplied by `scale`. In `first_run` the buffers become the gradients.
    """
    grads, params, buffers, *models = typed_rows("multi_tensor_sgd", tensor_lists, "aaa", "aFFH")
    stop = _nonzero(noop_flag)
    steps = _steps(1 if first_run else 2, params)
    values = {"momentum": momentum, "dampening": dampening, "nesterov": float(nesterov)}
    if all(p.dtype == torch.float32 for p in params):
        values |= {"lr": lr, "weight_decay": wd, "late_decay": float(wd_after_momentum)}
        inverse = torch.full((), scale, device=params[0].device).reciprocal()
        lists = _Lists(grads, params, [buffers], *models)
        _step("sgd", lists, steps, values, loss_scale=inverse, stop=stop)
        return
    # apex rounds the step to the type of half parameters before adding it. So the step is made in
    # FP32 by an SGD of rate -1 that starts at zero, and added by another one.
    before, after = (0.0, wd) if wd_after_momentum else (wd, 0.0)
    decayed = _weighted_sum(grads, scale, params, before, torch.float32)
    taken = [torch.zeros_like(g) for g in decayed]
    _step("sgd", _Lists(decayed, taken, [buffers]), steps, {**values, "lr": -1.0}, stop=stop)
    rounded = _weighted_sum(taken, -lr, params, -lr * after, None)
    _step("sgd", _Lists(rounded, params), steps, {"lr": -1.0}, stop=stop)


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Adam on (gradients, parameters, exp_avg, exp_avg_sq); the last two are float32."""
    grads, params, *states = typed_rows("multi_tensor_adam", tensor_lists, "abFF")
    values = _moments(lr, beta1, beta2, eps, weight_decay, mode, bias_correction)
    _step("adam", _Lists(grads, params, states), _steps(step, params), values)


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """:func:`multi_tensor_adam` with `lr`, `step` and `inv_scale` on the device.

    The gradients are multiplied by `inv_scale`, also where they are. A flag of 1 stops it. The
    moments are stored as they are (apex rounded them to the type of the parameter).
    """
    grads, params, *states = typed_rows("multi_tensor_adam_capturable", tensor_lists, "abFF")
    values = _moments(0.0, beta1, beta2, eps, weight_decay, mode, bias_correction)
    _adam_on_device(noop_flag, _Lists(grads, params, states), lr, step, values, inv_scale)


def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """:func:`multi_tensor_adam_capturable` on float32 masters, the fifth list.

    The parameters become what the masters round to.
    """
    name = "multi_tensor_adam_capturable_master"
    grads, models, *states, masters = typed_rows(name, tensor_lists, "abFFF")
    values = _moments(0.0, beta1, beta2, eps, weight_decay, mode, bias_correction)
    _adam_on_device(noop_flag, _Lists(grads, masters, states, models), lr, step, values, inv_scale)


def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    eps: float,
    mode: int,
    weight_decay: float,
) -> None:
    """Adagrad on (gradients, parameters, sums of squares)."""
    grads, params, sums = typed_rows("multi_tensor_adagrad", tensor_lists, "aaa")
    values = {"lr": lr, "eps": eps, "weight_decay": weight_decay, "decoupled": float(mode == 1)}
    _step("adagrad", _Lists(grads, params, [sums]), _steps(1, params), values)


def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    norm_type: int,
) -> None:
    """NovoGrad on (gradients, parameters, exp_avg). Sets the flag for gradients not finite.

    `grad_norms` (float32, one for each tensor) are the averages of norms, advanced in place; with
    bias correction they are corrected wherever they started. `norm_type`: 2, or 0 for the maximum.
    `mode` 0: norms and decay act on the gradient, before the moment; 1: on the moment.
    """
    if norm_type not in (0, 2):
        raise RuntimeError(
            f"multi_tensor_novograd: norm_type is 2, or 0 for the maximum: {norm_type}"
        )
    grads, params, exp_avg = typed_rows("multi_tensor_novograd", tensor_lists, "aaa")
    values = _moments(lr, beta1, beta2, eps, weight_decay, mode, bias_correction)
    # An average that started at the first norm would not be corrected without init_zero.
    values |= {"unaveraged": float(not grad_averaging), "init_zero": 1.0}
    values |= {"infinity_norm": float(norm_type == 0)}
    lists, steps = _Lists(grads, params, [exp_avg]), _steps(step, params)
    _step("novograd", lists, steps, values, norm_averages=grad_norms.detach())
    _norms(noop_flag, grads)


def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool | None = False,
) -> None:
    """LAMB on (gradients, parameters, exp_avg, exp_avg_sq); leaves the update in the gradients.

    Gradients are first divided by `global_grad_norm` / `max_grad_norm` if that is more than 1. Sets
    the flag for parameters and updates that are not finite.
    """
    grads, params, *states = typed_rows("multi_tensor_lamb", tensor_lists, "aaaa")
    values = _moments(0.0, beta1, beta2, eps, weight_decay, mode, bias_correction)
    values |= {"unaveraged": float(not grad_averaging)}
    clip = _clip(global_grad_norm, max_grad_norm, params)
    steps = _steps(step, params)
    param_norms = _norms(noop_flag, params)
    _step("lamb_update", _Lists(grads, params, states, updates=grads), steps, values, clip)
    rates = _lamb_rates(lr, weight_decay, use_nvlamb, param_norms, _norms(noop_flag, grads))
    _step("sgd", _Lists(grads, params), steps, {}, lr=rates)


def multi_tensor_lamb_mp(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: Tensor,
    use_nvlamb: bool | None,
    found_inf: Tensor,
    inv_scale: Tensor,
) -> None:
    """:func:`multi_tensor_lamb` with numbers on the device and, as a fifth list, half weights.

    Gradients are multiplied by `inv_scale` too. Reads and sets the flag: one that is set stops
    everything; a parameter that is not finite does so as well, and an update that is not finite,
    which has reached the moments by then, does not reach the parameters. `found_inf` is ignored.
    """
    typed = typed_rows("multi_tensor_lamb_mp", tensor_lists, "aaaa", "aFFFb")
    (grads, params, *states), models = typed[:4], typed[4:]
    values = _moments(0.0, beta1, beta2, eps, weight_decay, mode, bias_correction)
    values |= {"unaveraged": float(not grad_averaging)}
    clip = _clip(global_grad_norm, max_grad_norm, params) / _number(inv_scale, params)
    steps = _steps(step, params)
    param_norms = _norms(noop_flag, params)
    stop = _nonzero(noop_flag)
    _step("lamb_update", _Lists(grads, params, states, updates=grads), steps, values, clip, stop)
    update_norms = _norms(noop_flag, grads)
    rates = _lamb_rates(_number(lr, params), weight_decay, use_nvlamb, param_norms, update_norms)
    stop = _nonzero(noop_flag)
    _step("sgd", _Lists(grads, params, [], *models), steps, {}, stop=stop, lr=rates)


def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    per_tensor_decay: Tensor,
    step: int,
    beta1: float,
    beta2: float,
    eps: float,
    global_grad_norm: Tensor,
    max_global_grad_norm: float,
) -> None:
    """LAMB's update, on (gradients, parameters, exp_avg, exp_avg_sq, updates).

    `step` counts the steps before this one. The decay of each tensor is decoupled and is read on
    the host, which waits for it.
    """
    name = "multi_tensor_lamb_stage1_cuda"
    lists = typed_rows(name, tensor_lists, "abbbc")
    decays = _of_each(name, "per_tensor_decay", per_tensor_decay, lists[0]).tolist()
    clip = _clip(global_grad_norm, max_global_grad_norm, lists[0])
    for decay in dict.fromkeys(decays):  # a call of the kernel has one
        grads, params, *states, updates = (
            [t for t, d in zip(tensors, decays, strict=True) if d == decay] for tensors in lists
        )
        values = _moments(0.0, beta1, beta2, eps, decay, 1, 1)
        of_decay = _Lists(grads, params, states, updates=updates)
        _step("lamb_update", of_decay, _steps(step + 1, params), values, clip)


def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    lr: float,
    weight_decay: float,
    use_nvlamb: bool | None = False,
) -> None:
    """LAMB's step, on (parameters, updates), by the ratios of the norms."""
    name = "multi_tensor_lamb_stage2_cuda"
    params, updates = typed_rows(name, tensor_lists, "ab")
    param_norms = _of_each(name, "per_tensor_param_norm", per_tensor_param_norm, params)
    update_norms = _of_each(name, "per_tensor_update_norm", per_tensor_update_norm, params)
    rates = _lamb_rates(lr, weight_decay, use_nvlamb, param_norms, update_norms)
    _step("sgd", _Lists(updates, params), _steps(1, params), {}, lr=rates)


class _Lists(NamedTuple):
    """What a step works on; `models` receive the parameters, rounded."""

    grads: list[Tensor]
    params: list[Tensor]
    states: Sequence[list[Tensor]] = ()
    models: Sequence[Tensor] = ()
    updates: Sequence[Tensor] = ()


def _step(
    algorithm: str,
    lists: _Lists,
    steps: Tensor,
    values: dict[str, float],
    loss_scale: Tensor | None = None,
    stop: Tensor | None = None,
    *,
    lr: Tensor | None = None,
    norm_averages: Tensor | None = None,
) -> None:
    """The kernels' step. It advances `steps`, which nobody keeps: the caller counts."""
    grads, params, states, models, updates = lists
    tensors = (grads, params, models, states, updates, steps, norm_averages, lr)
    checked(_core.C.step, algorithm, *tensors, values, loss_scale, stop)


def _adam_on_device(
    noop_flag: Tensor,
    lists: _Lists,
    lr: Tensor,
    step: Tensor,
    values: dict[str, float],
    inv_scale: Tensor,
) -> None:
    grads, params = lists.grads, lists.params
    stop = (noop_flag == 1).float().reshape(())
    inverse = _number(inv_scale, params)
    steps, rate = _steps(step, params), _number(lr, params)
    _step("adam", lists, steps, values, inverse.reciprocal(), stop, lr=rate)
    checked(ops.unscale, grads, grads, torch.where(stop > 0, torch.ones_like(inverse), inverse))


def _moments(
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    mode: int,
    bias_correction: int,
) -> dict[str, float]:
    return {
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": weight_decay,
        "decoupled": float(mode == 1),
        "uncorrected": float(not bias_correction),
    }


def _steps(step: int | Tensor, tensors: list[Tensor]) -> Tensor:
    """How many steps each tensor has behind it in its `step`-th."""
    device = tensors[0].device
    if not isinstance(step, Tensor):
        return torch.full((len(tensors),), step - 1.0, device=device)
    return (step.detach().to(device, torch.float32).reshape(1) - 1).repeat(len(tensors))


def _number(value: Tensor | float, tensors: list[Tensor]) -> Tensor:
    """As float32 of one element, where the tensors are."""
    device = tensors[0].device
    if not isinstance(value, Tensor):
        return torch.full((1,), value, dtype=torch.float32, device=device)
    return value.detach().to(device, torch.float32).reshape(1)


def _of_each(name: str, what: str, values: Tensor, tensors: list[Tensor]) -> Tensor:
    if values.numel() != len(tensors):
        raise RuntimeError(
            f"{name}: {what} has {values.numel()} elements for {len(tensors)} tensors."
        )
    return values.detach().to(tensors[0].device, torch.float32).reshape(-1)


def _nonzero(noop_flag: Tensor) -> Tensor:
    return (noop_flag != 0).float().reshape(())


def _norms(noop_flag: Tensor, tensors: list[Tensor]) -> Tensor:
    """The norm of each; the flag is set if one is not finite."""
    _, norms = checked(ops.l2norm, tensors, True)
    set_flag(noop_flag, ~norms.isfinite().all())
    return norms


def _clip(norm: Tensor, largest: Tensor | float, tensors: list[Tensor]) -> Tensor:
    """What divides the gradients. A `largest` of 0 is no exception: they become zero."""
    norm, largest = _number(norm, tensors), _number(largest, tensors)
    return torch.where(norm > largest, norm / largest, torch.ones_like(norm))


def _lamb_rates(
    lr: Tensor | float,
    weight_decay: float,
    use_nvlamb: bool | None,
    param_norms: Tensor,
    update_norms: Tensor,
) -> Tensor:
    """The learning rate of each tensor, times its trust ratio if it has one."""
    one = torch.ones_like(param_norms)
    if not use_nvlamb and weight_decay == 0:
        return lr * one
    both = (param_norms != 0) & (update_norms != 0)
    return lr * torch.where(both, param_norms / update_norms, one)


def _weighted_sum(
    x: list[Tensor], a: float, y: list[Tensor], b: float, dtype: torch.dtype | None
) -> list[Tensor]:
    """``a * x + b * y`` in `dtype`, or in y's types. Without `b`, y may hold anything."""
    out = [torch.empty_like(t, dtype=dtype) for t in y]
    if b == 0:
        checked(ops.scale, x, out, a)
    else:
        checked(ops.axpby, x, y, out, a, b)
    return out
