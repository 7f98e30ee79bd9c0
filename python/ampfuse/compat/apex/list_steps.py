"""The steps of ``amp_C``'s optimizers, on lists of tensors.

Types of optimizers are those that apex's had, or bfloat16 where it took float16; there is no
float64. Arithmetic is FP32. The flag, where an optimizer reads it, stops everything. `mode` is 0
for weight decay through the gradient and 1 for decoupled decay.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ampfuse import _core, ops
from ampfuse._schema import ALGORITHMS
from ampfuse.compat.apex.multi_tensor_apply import (
    Lists,
    TensorLists,
    Types,
    checked,
    set_flag,
    typed_rows,
)

Numbers = dict[str, Any]

_MOMENTS = {"grads": "grads", "params": "params", "exp_avg": "float32", "exp_avg_sq": "float32"}
_LAMB_LISTS = dict.fromkeys(("grads", "params", "exp_avg", "exp_avg_sq"), "grads")
# The names of an operation's numbers, in their order.
_ADAM = "lr beta1 beta2 eps step mode bias_correction weight_decay"
_LAMB = (
    "lr beta1 beta2 eps step bias_correction weight_decay grad_averaging mode "
    "global_grad_norm max_grad_norm"
)


def _operation(names: str, *types: Types, **defaults: Any) -> Callable[..., Callable[..., None]]:
    """Turn ``f(noop_flag, lists, numbers)`` into an operation with ``amp_C``'s positional call.

    `names` are the names of the values, in order; a ``per_tensor`` one is a tensor with an element
    for each row. `types` has the lists: gradients, parameters, half weights that receive these
    (models), a place for updates, and the states of the algorithm. A second one is for calls with
    another number of lists. The last values may have `defaults`.
    """
    name_of = names.split()

    def decorate(run: Callable[[Tensor, Lists, Numbers], None]) -> Callable[..., None]:
        @functools.wraps(run)
        def operation(
            chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, *values: Any
        ) -> None:
            numbers = {**defaults, **dict(zip(name_of, values, strict=False))}
            if len(numbers) < len(name_of) or len(values) > len(name_of):
                problem = f"got {len(values)} values after the lists of tensors"
                raise TypeError(f"{run.__name__}: {problem}; it takes {', '.join(name_of)}.")
            lists, length = typed_rows(run.__name__, tensor_lists, *types), len(tensor_lists[0])
            for name, value in numbers.items():
                if name.startswith("per_tensor") and value.numel() != length:
                    problem = f"{name} has {value.numel()} elements for {length} tensors"
                    raise RuntimeError(f"{run.__name__}: {problem}.")
            run(noop_flag, lists, numbers)

        del operation.__wrapped__  # the signature is that of the call
        operation.__doc__ = f"{inspect.getdoc(run)}\n\nValues: {', '.join(name_of)}."
        return operation

    return decorate


@_operation(
    "weight_decay momentum dampening lr nesterov first_run wd_after_momentum scale",
    dict.fromkeys(("grads", "params", "momentum_buffer"), "grads"),
    {"grads": "grads", "params": "float32", "momentum_buffer": "float32", "models": "half"},
)
def multi_tensor_sgd(noop_flag: Tensor, lists: Lists, numbers: Numbers) -> None:
    """SGD on (gradients, parameters, momentum buffers[, half model weights]). Reads the flag.

    Gradients are multiplied by `scale`. In `first_run` the buffers become the gradients.
    """
    grads, params, stop = lists["grads"], lists["params"], (noop_flag != 0).float()
    numbers["step"] = 1 if numbers["first_run"] else 2
    if all(p.dtype == torch.float32 for p in params):
        _step("sgd", lists, numbers, loss_scale=1 / _floats(numbers["scale"], lists), stop=stop)
        return
    # apex rounds the step to the type of half parameters before adding it. So the step is made in
    # FP32, from the decay on where that comes late, and rounded as half weights of masters are.
    decay = numbers.pop("weight_decay")
    late = -numbers["lr"] * decay if numbers["wd_after_momentum"] else 0.0
    step = [p.float() * late if late else torch.zeros_like(p, dtype=torch.float32) for p in params]
    scaled = [torch.empty_like(t) for t in step]
    early = 0.0 if numbers["wd_after_momentum"] else decay
    if early:
        checked(ops.axpby, grads, params, scaled, numbers["scale"], early)
    else:
        checked(ops.scale, grads, scaled, numbers["scale"])
    rounded = [torch.zeros_like(p) for p in params]
    _step("sgd", lists | {"grads": scaled, "params": step, "models": rounded}, numbers, stop=stop)
    torch._foreach_add_(params, rounded)


@_operation(_ADAM, _MOMENTS)
def multi_tensor_adam(noop_flag: Tensor, lists: Lists, numbers: Numbers) -> None:
    """Adam on (gradients, parameters, exp_avg, exp_avg_sq); the last two are float32."""
    _step("adam", lists, numbers)


@_operation(f"{_ADAM} inv_scale", _MOMENTS)
def multi_tensor_adam_capturable(noop_flag: Tensor, lists: Lists, numbers: Numbers) -> None:
    """:func:`multi_tensor_adam` with `lr`, `step` and `inv_scale` on the device.

    The gradients are multiplied by `inv_scale`, also where they are. A flag of 1 stops it.
    """
    _capturable_adam(noop_flag, lists, numbers)


@_operation(
    f"{_ADAM} inv_scale",
    {"grads": "grads", "models": "models"}
    | dict.fromkeys(("exp_avg", "exp_avg_sq", "params"), "float32"),
)
def multi_tensor_adam_capturable_master(noop_flag: Tensor, lists: Lists, numbers: Numbers) -> None:
    """Like :func:`multi_tensor_adam_capturable`, on float32 masters, which are the fifth list.

    The parameters receive the rounded masters.
    """
    _capturable_adam(noop_flag, lists, numbers)


def _capturable_adam(noop_flag: Tensor, lists: Lists, numbers: Numbers) -> None:
    grads, inverse = lists["grads"], _floats(numbers["inv_scale"], lists)
    stop = (noop_flag == 1).float()
    _step("adam", lists, numbers, loss_scale=1 / inverse, stop=stop)
    checked(ops.unscale, grads, grads, torch.where(stop > 0, torch.ones_like(inverse), inverse))


@_operation("lr eps mode weight_decay", dict.fromkeys(("grads", "params", "sum"), "grads"))
def multi_tensor_adagrad(noop_flag: Tensor, lists: Lists, numbers: Numbers) -> None:
    """Adagrad on (gradients, parameters, sums of squares)."""
    _step("adagrad", lists, numbers)


@_operation(
    "grad_norms lr beta1 beta2 eps step bias_correction weight_decay grad_averaging mode norm_type",
    dict.fromkeys(("grads", "params", "exp_avg"), "grads"),
)
def multi_tensor_novograd(noop_flag: Tensor, lists: Lists, numbers: Numbers) -> None:
    """NovoGrad on (gradients, parameters, exp_avg). Sets the flag for gradients not finite.

    `grad_norms` (float32, one for each tensor) are the averages of norms, advanced in place; with
    bias correction they are corrected wherever they started. `norm_type`: 2, or 0 for the maximum.
    `mode` 0: norms and decay act on the gradient, before the moment; 1: on the moment.
    """
    if (kind := numbers["norm_type"]) not in (0, 2):
        raise RuntimeError(f"multi_tensor_novograd: norm_type must be 0 (maximum) or 2, not {kind}")
    # An average that started at the first norm would not be corrected without init_zero.
    numbers |= {"init_zero": True, "reg_inside_moment": 1 - numbers["mode"]}
    _step("novograd", lists, numbers, norm_averages=numbers["grad_norms"].detach())
    _norms(noop_flag, lists["grads"])


@_operation(f"{_LAMB} use_nvlamb", _LAMB_LISTS, use_nvlamb=False)
def multi_tensor_lamb(noop_flag: Tensor, lists: Lists, numbers: Numbers) -> None:
    """LAMB on (gradients, parameters, exp_avg, exp_avg_sq); leaves the update in the gradients.

    They are first divided by `global_grad_norm` / `max_grad_norm` if that is more than 1. Sets the
    flag for parameters and updates that are not finite.
    """
    _lamb(noop_flag, lists, numbers, stop_on_flag=False)


@_operation(
    f"{_LAMB} use_nvlamb found_inf inv_scale",
    _LAMB_LISTS,
    {"grads": "grads"}
    | dict.fromkeys(("params", "exp_avg", "exp_avg_sq"), "float32")
    | {"models": "models"},
)
def multi_tensor_lamb_mp(noop_flag: Tensor, lists: Lists, numbers: Numbers) -> None:
    """:func:`multi_tensor_lamb` with numbers on the device and, as a fifth list, half weights.

    Gradients are multiplied by `inv_scale` too. A flag that is set stops everything, and so does a
    parameter that is not finite; an update that is not finite has reached the moments, but does
    not reach the parameters. `found_inf` is ignored.
    """
    _lamb(noop_flag, lists, numbers, stop_on_flag=True)


@_operation(
    "per_tensor_decay step beta1 beta2 eps global_grad_norm max_grad_norm",
    {"grads": "grads"}
    | dict.fromkeys(("params", "exp_avg", "exp_avg_sq"), "params")
    | {"updates": "updates"},
)
def multi_tensor_lamb_stage1_cuda(noop_flag: Tensor, lists: Lists, numbers: Numbers) -> None:
    """LAMB's update, on (gradients, parameters, exp_avg, exp_avg_sq, updates).

    `step` counts the steps before this one. Reading the decays, which are decoupled,
    synchronizes with the device.
    """
    decays = numbers["per_tensor_decay"].tolist()
    numbers = numbers | {"step": numbers["step"] + 1}
    for decay in dict.fromkeys(decays):  # the kernel takes one per call
        has_it = [d == decay for d in decays]
        same_decay = {
            name: list(itertools.compress(tensors, has_it)) for name, tensors in lists.items()
        }
        options = numbers | {"weight_decay": decay}
        _step("lamb_update", same_decay, options, loss_scale=_clip(numbers, lists))


@_operation(
    "per_tensor_param_norm per_tensor_update_norm lr weight_decay use_nvlamb",
    {"params": "params", "grads": "grads"},
    use_nvlamb=False,
)
def multi_tensor_lamb_stage2_cuda(noop_flag: Tensor, lists: Lists, numbers: Numbers) -> None:
    """LAMB's step, on (parameters, updates), by the ratios of the norms."""
    norms = numbers["per_tensor_param_norm"], numbers["per_tensor_update_norm"]
    _step("sgd", lists, {"lr": _lamb_rates(numbers, lists, *norms)})


def _lamb(noop_flag: Tensor, lists: Lists, numbers: Numbers, *, stop_on_flag: bool) -> None:
    """Both halves of LAMB. `stop_on_flag`: stop if it is set on entry or on the way."""
    grads, params, models = lists["grads"], lists["params"], lists.pop("models", [])
    clip = _clip(numbers, lists) / _floats(numbers.get("inv_scale", 1.0), lists)
    param_norms = _norms(noop_flag, params)
    stop = (noop_flag != 0).float() * stop_on_flag
    _step("lamb_update", lists | {"updates": grads}, numbers, loss_scale=clip, stop=stop)
    rates = _lamb_rates(numbers, lists, param_norms, _norms(noop_flag, grads))
    stop = (noop_flag != 0).float() * stop_on_flag
    _step("sgd", {"grads": grads, "params": params, "models": models}, {"lr": rates}, stop=stop)


def _step(
    algorithm: str, lists: Lists, numbers: Numbers, *, loss_scale: Tensor | None = None,
    stop: Tensor | None = None, norm_averages: Tensor | None = None,
) -> None:  # fmt: skip
    """The kernels' step, on gradients divided by `loss_scale`.

    The step is the first one if `numbers` has none.
    """
    params, roles = lists["params"], ("grads", "params", "models", "updates")
    # The options as a parameter group has them.
    group = {"decoupled_weight_decay": numbers.get("mode", 1), **numbers}
    if "beta1" in numbers:
        group["betas"] = numbers["beta1"], numbers["beta2"]
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
        (_floats(numbers.get("step", 1), lists) - 1).repeat(len(params)),  # the caller counts
        norm_averages,
        rates,
        values,
        loss_scale,
        stop,
    )


def _floats(value: Tensor | float, lists: Lists) -> Tensor:
    """`value` as float32 of one dimension, on the device of the tensors."""
    device = lists["params"][0].device
    return torch.as_tensor(value, dtype=torch.float32, device=device).detach().reshape(-1)


def _norms(noop_flag: Tensor, tensors: list[Tensor]) -> Tensor:
    """The norm of each; the flag is set if one is not finite."""
    _, norms = checked(ops.l2norm, tensors, True)
    set_flag(noop_flag, ~norms.isfinite().all())
    return norms


def _clip(numbers: Numbers, lists: Lists) -> Tensor:
    """The divisor of the gradients. A `max_grad_norm` of 0 is not special: they become zero."""
    norm, largest = (
        _floats(numbers[name], lists) for name in ("global_grad_norm", "max_grad_norm")
    )
    return torch.where(norm > largest, norm / largest, torch.ones_like(norm))


def _lamb_rates(
    numbers: Numbers, lists: Lists, param_norms: Tensor, update_norms: Tensor
) -> Tensor:
    """The learning rate of each tensor, times its trust ratio if it has one."""
    norms, updates = _floats(param_norms, lists), _floats(update_norms, lists)
    ratios = torch.ones_like(norms)
    if numbers["use_nvlamb"] or numbers["weight_decay"] != 0:
        ratios = torch.where((norms != 0) & (updates != 0), norms / updates, ratios)
    return _floats(numbers["lr"], lists) * ratios
