"""``amp.initialize``: put models and optimizers at a level, in place.

First everything is checked, then everything is changed: a call that raises leaves the models and
optimizers as they were.
"""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ampfuse import half_ops
from ampfuse.amp import no_sync
from ampfuse.amp import session as sessions
from ampfuse.amp.casts import Casts, check_can_install, install, is_installed
from ampfuse.amp.function_casts import install_registered
from ampfuse.amp.policy import Policy, make_policy
from ampfuse.amp.scaler import LossScaler
from ampfuse.amp.weights import cast_model, save_in_float32, warn_of_range
from ampfuse.devices import check_device, check_materialized
from ampfuse.nn import fuse
from ampfuse.optim import upgrade
from ampfuse.optim.masters import MASTERS
from ampfuse.optim.options import Rule, check
from ampfuse.optim.param_groups import parameters, with_wrapped
from ampfuse.optim.sharding import is_sharded
from ampfuse.optim.upgrade import FusedOptimizer, check_upgrade
from ampfuse.torch_utils import FLOAT_DTYPES, HALF_DTYPES, eager_module

_log = logging.getLogger("ampfuse.amp")
_CALL = 'The call is amp.initialize(model, optimizer, opt_level="O5").'
_ENABLED = Rule(
    lambda value: value in (True, False, None, "True", "False"), f"True or False. {_CALL}"
)


def initialize(
    models: nn.Module | Sequence[nn.Module],
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | Literal["split"] | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    patch_torch_functions_type: torch.dtype | None = None,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
    allow_incoming_model_not_fp32: bool = False,
    fuse: bool = False,
) -> Any:
    """Prepare `models` and `optimizers` for mixed precision at `opt_level`; return them.

    The objects are changed in place and returned, so a script may ignore the return value. Call it
    before wrapping a model in (Distributed)DataParallel. It may be called several times, for
    different models and optimizers; each call has loss scalers of its own.

    Arguments:
        models: a module, or a list or tuple of modules, on any device.
        optimizers: one, a list or tuple of them, or None (inference).
        enabled: False changes nothing and makes every amp call pass its arguments through.
        opt_level: "O0" to "O5"; see :mod:`ampfuse.amp.policy`.
        cast_model_type: cast weights and inputs to this type; False = do not cast.
        patch_torch_functions: run ``forward`` under autocast (the name is apex's).
        keep_batchnorm_fp32: leave batch norms that have weights in FP32; bool or its string.
        master_weights: let the optimizers step FP32 copies of half parameters. ``"split"``: the
            copy is the half weight and 16 more bits, 2 bytes a parameter less, which only fused
            optimizers step; see :class:`ampfuse.optim.Options`. None: the kind that an optimizer
            of ours was built with; without any, what the level says.
        loss_scale: a static scale (number or its string) or "dynamic".
        cast_model_outputs: cast the models' outputs to this type instead of FP32.
        num_losses: how many independent loss scalers to make, for ``scale_loss(..., loss_id=i)``.
        verbosity: 1 logs the policy (logger "ampfuse.amp", level INFO), 0 does not; 2 also every
            skipped step, for which the host waits for the device once per backward pass.
        min_loss_scale, max_loss_scale: bounds of a dynamic scale. None as minimum means 2**-24,
            so that a persistent NaN cannot bring the scale to 0.
        patch_torch_functions_type: the type of autocast; only the level's own is accepted.
        init_scale, growth_factor, backoff_factor, growth_interval: of dynamic scaling.
        hysteresis: the scale backs off at this overflow since it last grew, and at each one after.
        allow_incoming_model_not_fp32: accept half parameters that will not have a master.
        fuse: fuse norms, activations and more, see :func:`ampfuse.nn.fuse`.

    Returns:
        ``models`` if `optimizers` is None, else ``(models, optimizers)``, in the shape given.

    Raises:
        RuntimeError: unknown level; overrides that contradict it; a model in DataParallel or
            DistributedDataParallel; an optimizer that is initialized already, or optimizers that
            hold no parameter of the models; parameters on the meta device, or on one without
            kernels; a lazy module that was not called yet, or at O2, O3 and O5 one in a model;
            trainable half parameters at a level that expects FP32 ones.
        TypeError: `models` or `optimizers` have another type; parameters of a type that the
            optimizers do not support (float64, complex, tensors without memory of their own).
        ValueError, AssertionError: malformed values, see :func:`ampfuse.amp.policy.make_policy`;
            a level in the place of `enabled`.

    Masters start from the FP32 weights before the cast, not from rounded ones. With several
    processes they start from the rounded weights, which DistributedDataParallel broadcasts, so that
    all masters agree, and the log says so: call ``init_process_group`` before, or start with
    torchrun. ``WORLD_SIZE`` in the environment counts as several processes. A half-precision model
    is accepted at levels that cast it (O0, O2, O3, O5): its masters are exact copies, and a warning
    says that digits lost earlier are lost. At O1 and O4 the optimizer would update half parameters
    directly, where updates smaller than 1/2000 (FP16) or 1/250 (BF16) of the weight vanish, so that
    is an error.

    Source: ``apex.amp.initialize``; O4 and O5 from ROCm/apex.
    """
    if not isinstance(verbosity, int):
        raise TypeError(f"verbosity must be 0, 1 or 2, not {verbosity!r}.")
    check("enabled", enabled, _ENABLED)
    if enabled not in (True, "True"):
        return turn_off(models, optimizers, sessions.Session(policy=None, verbosity=verbosity))

    policy = make_policy(
        opt_level,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        patch_torch_functions_type=patch_torch_functions_type,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
        cast_model_outputs=cast_model_outputs,
        fuse=fuse,
    )
    session = make_session(
        policy,
        num_losses,
        verbosity,
        init_scale=init_scale,
        scale_factor=growth_factor,
        scale_window=growth_interval,
        min_loss_scale=min_loss_scale,
        max_loss_scale=max_loss_scale,
        backoff_factor=backoff_factor,
        hysteresis=hysteresis,
    )
    own_masters = master_weights is None
    allow_half = allow_incoming_model_not_fp32
    return set_up(models, optimizers, session, allow_half=allow_half, own_masters=own_masters)


def make_session(
    policy: Policy,
    num_losses: Any,
    verbosity: int,
    *,
    scaler: type[LossScaler] = LossScaler,
    **scaling: Any,
) -> sessions.Session:
    """The session of a call of :func:`initialize`: a `scaler` of this `scaling` for each loss."""
    if not (isinstance(num_losses, int) and num_losses >= 1):
        raise ValueError(f"num_losses must be an integer of at least 1, not {num_losses!r}.")
    scalers = [scaler(policy.loss_scale, **scaling) for _ in range(num_losses)]
    return sessions.Session(policy, scalers, verbosity)


def set_up(
    models: Any,
    optimizers: Any,
    session: sessions.Session,
    *,
    allow_half: bool,
    own_masters: bool = False,
) -> Any:
    """The part of :func:`initialize` after its arguments have become a session.

    `own_masters`: optimizers that were built with masters keep their kind.
    """
    policy = session.policy
    assert policy is not None
    model_list = _as_list(models, nn.Module, "models", "a torch.nn.Module")
    listed = [] if optimizers is None else optimizers
    optimizer_list = _as_list(listed, Optimizer, "optimizers", "a torch.optim.Optimizer")
    names = {id(parameter): name for name, parameter in _named_parameters(model_list)}
    keep_own = own_masters and policy.model_is_low_precision
    masters = [_masters_of(optimizer, policy, keep_own) for optimizer in optimizer_list]
    _check(model_list, optimizer_list, masters, names, policy, allow_half)

    if session.verbosity >= 1:
        _log.info("%s", policy)
    exact = {}
    if any(masters) and not _trains_with_others():
        exact = _float32_values(optimizer_list, policy)
    for model in model_list:
        _set_up_model(model, policy, session.verbosity)
    for optimizer, kind in zip(optimizer_list, masters, strict=True):
        _upgrade(optimizer, kind, names, exact)
        optimizer.skip_on_overflow = policy.is_dynamic
        optimizer.skip_by_default = policy.opt_level in ("O4", "O5")
        optimizer._amp_session = session
    no_sync.watch()
    session.casts_cpu = any(p.is_cpu for _, p in _named_parameters(model_list))
    if session.casts_cpu:
        half_ops.enable_for(policy)
    sessions.set_latest(session)
    if policy.autocast_type is not None:
        install_registered()
    return models if optimizers is None else (models, optimizers)


def _masters_of(optimizer: Any, policy: Policy, keep_own: bool) -> bool | Literal["split"]:
    """The kind of masters that it gets: that of the level, or with `keep_own` the one it has."""
    stepper = with_wrapped(optimizer)[-1]
    if keep_own and isinstance(stepper, FusedOptimizer) and stepper.master_weights:
        return stepper.master_weights
    return policy.master_weights or False


def _set_up_model(model: nn.Module, policy: Policy, verbosity: int) -> None:
    if policy.fuse:
        report = fuse(model)
        if verbosity >= 1:
            _log.info("%s", report.summary)
    if policy.weights_type is not None:
        keep = bool(policy.keep_batchnorm_fp32)
        cast_model(eager_module(model), policy.weights_type, keep_batchnorm_fp32=keep)
        save_in_float32(eager_module(model))
    install(model, Casts.of(policy))


def _upgrade(
    optimizer: Any,
    masters: bool | Literal["split"],
    names: dict[int, str],
    exact: dict[int, Tensor],
) -> None:
    """Upgrade `optimizer`. Its masters start from `exact`, the weights as they were before the
    cast, unless a checkpoint that was loaded before brought some."""
    before = list(parameters(optimizer))
    for inner in with_wrapped(optimizer):
        state = getattr(inner, "state", {})
        for parameter in before:
            if MASTERS & state.get(parameter, {}).keys():
                exact.pop(id(parameter), None)
    upgrade(optimizer, master_weights=masters, names=names)
    for original, master in zip(before, parameters(optimizer), strict=True):
        if masters and id(original) in exact and original.dtype in HALF_DTYPES:
            state = optimizer.state[master] if is_sharded(master) else {}
            optimizer.restore_master(master, state, exact[id(original)])


def _trains_with_others() -> bool:
    """Whether other processes train the same model.

    DistributedDataParallel broadcasts the first process's weights, which are half then. Masters
    that start from them are equal; masters of FP32 weights would differ between processes. Before
    there is a process group, torchrun's environment counts; the log says which of the two did.
    """
    distributed = torch.distributed
    is_sure = distributed.is_available() and distributed.is_initialized()
    size = distributed.get_world_size() if is_sure else os.environ.get("WORLD_SIZE") or "1"
    if str(size) == "1":
        return False
    _log.log(
        logging.INFO if is_sure or "TORCHELASTIC_RUN_ID" in os.environ else logging.WARNING,
        "Masters start from the rounded weights, which DistributedDataParallel broadcasts, because "
        "%s says that %s processes train. In a single process they start from the FP32 weights, so "
        "results differ.",
        "the process group" if is_sure else "WORLD_SIZE in the environment",
        size,
    )
    return True


def _float32_values(optimizers: list[Any], policy: Policy) -> dict[int, Tensor]:
    """The exact FP32 values, by id, of the parameters that the cast will round.

    For an FP32 parameter that is its present memory, which the cast does not reuse: no copy.
    """
    return {
        id(p): p.detach().float()
        for optimizer in optimizers
        for p in parameters(optimizer)
        if p.is_floating_point() and p.dtype != policy.weights_type
    }


def turn_off(models: Any, optimizers: Any, session: sessions.Session) -> Any:
    """Implement :func:`initialize` with ``enabled=False``."""
    sessions.set_latest(session)
    for item in optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]:
        if isinstance(item, Optimizer):  # the argument was not checked
            item._amp_session = session  # type: ignore[attr-defined]
    return models if optimizers is None else (models, optimizers)


# --- what is checked before anything changes ------------------------------------------------------


def _check(
    models: list[nn.Module],
    optimizers: list[Optimizer],
    masters: list[bool | Literal["split"]],
    names: dict[int, str],
    policy: Policy,
    allow_half: bool,
) -> None:
    """Raise for what cannot train under `policy`, and warn of what may not be meant.

    `masters` are the kinds of the optimizers' masters, `names` those of parameters by id.
    """
    for model in models:
        _check_model(model)
    for name, parameter in _named_parameters(models) if policy.model_is_low_precision else ():
        if nn.parameter.is_lazy(parameter):
            raise RuntimeError(
                f"Parameter {name!r} has no shape yet, so it cannot be cast: call the model once "
                "before amp.initialize."
            )
    _check_half_parameters(models, policy, allow_half)
    if len(set(map(id, optimizers))) < len(optimizers):
        raise RuntimeError("The same optimizer is listed twice.")
    for optimizer, kind in zip(optimizers, masters, strict=True):
        check_upgrade(optimizer, kind)
        _check_optimizer(optimizer, policy, names)
    _check_devices(models if policy.fuse else [], optimizers, names)
    _check_unknown_parameters(models, optimizers, names)
    _warn_of_shared(optimizers, names)
    for model in models if policy.weights_type is torch.float16 else ():
        warn_of_range(model, policy)


def _as_list(value: Any, kind: type, name: str, article: str) -> list[Any]:
    """`value` as a list of `kind`s. Raises TypeError for anything else."""
    items = [value] if isinstance(value, kind) else value
    for item in items if isinstance(items, (list, tuple)) else [value]:
        if not isinstance(item, kind):
            must = f"{name} must be {article}, or a list or tuple of them"
            raise TypeError(f"{must}; got {type(item).__name__}. {_CALL}")
    return list(items)


def _named_parameters(models: list[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters with the names that messages use; ``models[1].`` in front if there are several."""
    for index, model in enumerate(models):
        prefix = f"models[{index}]." if len(models) > 1 else ""
        for name, parameter in eager_module(model).named_parameters():
            yield prefix + name, parameter


def _check_model(model: nn.Module) -> None:
    wrapper = eager_module(model)
    if isinstance(wrapper, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise RuntimeError(
            f"The model is already wrapped in {type(wrapper).__name__}. Call amp.initialize on "
            "the bare model, then wrap what it returns: the wrapper must see the weights in their "
            "final dtype."
        )
    if getattr(wrapper, "cls_to_become", None) is not None:
        raise RuntimeError(
            f"{type(wrapper).__name__} changes its class at the first call, which would end the "
            "casts: call it once before amp.initialize."
        )
    check_can_install(model)


def _check_half_parameters(models: list[nn.Module], policy: Policy, allow: bool) -> None:
    """Raise or warn for half parameters, unless an earlier call at such a level made them."""
    installed = [model for model in models if is_installed(model)]
    made = {id(p) for _, p in _named_parameters(installed) if p.dtype == policy.weights_type}
    half = [
        (name, parameter.dtype)
        for name, parameter in _named_parameters(models)
        if parameter.dtype in HALF_DTYPES and parameter.requires_grad and id(parameter) not in made
    ]
    if not half or allow:
        return
    name, dtype = half[0]
    kind = str(dtype).removeprefix("torch.")
    if policy.weights_type is None:
        raise RuntimeError(
            f"Parameter {name!r} is {kind}, but {policy.opt_level} trains FP32 parameters: the "
            "optimizer would step it in half precision and lose small updates. Call model.float() "
            "before making the optimizer, or use O2 (float16) or O5 (bfloat16), or freeze it "
            "(requires_grad_(False)); allow_incoming_model_not_fp32=True accepts it unchanged."
        )
    warnings.warn(
        f"The model already has {len(half)} half-precision parameter(s), the first being {name!r} "
        f"({kind}). Their masters start as exact copies, without the digits lost in the earlier "
        "cast: if you have the weights in FP32, load those and let amp.initialize cast them.",
        stacklevel=5,
    )


def _check_optimizer(optimizer: Optimizer, policy: Policy, names: dict[int, str]) -> None:
    kind = type(optimizer).__name__
    if sessions.enabled_of(optimizer) is not None:
        raise RuntimeError(
            f"This {kind} has already been through amp.initialize. To initialize the model again, "
            "create a new optimizer from model.parameters(), pass it to amp.initialize, then call "
            "new.load_state_dict(old.state_dict()), which keeps moments and masters. To keep the "
            "loss scale, call amp.state_dict() before and amp.load_state_dict() after."
        )
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            place = f"param_groups[{g}]['params'][{i}]"
            name, dtype = names.get(id(parameter), place), parameter.dtype
            check_materialized(parameter, f"Parameter {name!r}")
            if not is_sharded(parameter) and is_traceable_wrapper_subclass(parameter):
                raise TypeError(
                    f"Parameter {name!r} is a {type(parameter).__name__}, which has no memory of "
                    "its own; amp supports plain tensors and DTensors. FP8 layers of torchao have "
                    "plain weights with enable_fsdp_float8_all_gather=False."
                )
            if id(parameter) in names and dtype.is_floating_point:
                dtype = policy.weights_type or dtype
            if dtype not in FLOAT_DTYPES:
                raise TypeError(
                    f"Parameter {name!r} would be updated in {dtype}, but amp only supports "
                    "float32, float16 and bfloat16 parameters. Cast the model (model.float()), or "
                    "put this parameter into a separate optimizer that does not go through "
                    "amp.initialize."
                )


def _check_devices(
    fused: list[nn.Module], optimizers: list[Optimizer], names: dict[int, str]
) -> None:
    """Raise RuntimeError for parameters on a device without kernels."""
    read: list[Tensor] = [p for model in fused for p in eager_module(model).parameters()]
    read += [p for optimizer in optimizers for p in parameters(optimizer)]
    first = {param.device: param for param in reversed(read)}
    for device, param in first.items():
        check_device(device, f"Parameter {names.get(id(param), 'of an optimizer')!r}")


def _check_unknown_parameters(
    models: list[nn.Module], optimizers: list[Optimizer], names: dict[int, str]
) -> None:
    """Raise or warn if an optimizer seems to hold parameters that a model had before.

    Nothing is checked unless some parameter of the models is in no optimizer. If none is in one, a
    RuntimeError is raised. Otherwise there is a warning for an optimizer without parameters of the
    models, if its own have the shapes of a model's; and for one with parameters that no module or
    variable holds any more. Other parameters may belong to a loss, or to a model without amp.
    """
    held = [[p for one in with_wrapped(each) for p in parameters(one)] for each in optimizers]
    stepped = {id(param) for params in held for param in params}
    own = [list(eager_module(model).parameters()) for model in models]
    left_out = [p for listed in own for p in listed if p.requires_grad and id(p) not in stepped]
    if not (optimizers and left_out):
        return
    is_none_trained = stepped.isdisjoint(names)
    shapes = [_shapes(listed) for listed in own if stepped.isdisjoint(map(id, listed))]
    for optimizer, params in zip(optimizers, held, strict=True):
        unknown = [param for param in params if id(param) not in names]
        is_all_unknown = len(unknown) == len(params) > 0
        is_like_a_model = _shapes(parameters(optimizer)) in shapes
        is_of_a_copy = is_all_unknown and (is_none_trained or is_like_a_model)
        if is_of_a_copy or _some_is_forgotten(unknown):
            message = (
                f"{type(optimizer).__name__} has {len(unknown)} parameter(s) of no model passed "
                f"to amp.initialize, and {names[id(left_out[0])]!r} ({len(left_out)} such in all) "
                "is in no optimizer, so it would not be trained. Was the optimizer created before "
                "the model was copied, or before its parameters were replaced (weight_norm, "
                "to_empty, load_state_dict(assign=True), fully_shard, a new layer)? Create it from "
                "model.parameters() just before amp.initialize. If this is intended, freeze what "
                "is not trained: requires_grad_(False)."
            )
            if is_none_trained:
                raise RuntimeError(message)
            _log.warning(message)


def _shapes(params: Iterable[Tensor]) -> list[Any]:
    """The shapes of `params`; of lazy ones, which have none yet, something of their own."""
    return [id(p) if nn.parameter.is_lazy(p) else p.shape for p in params]


def _warn_of_shared(optimizers: list[Optimizer], names: dict[int, str]) -> None:
    """Warn of a parameter that two optimizers hold: each of them may make a master of it."""
    holders: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        for parameter in parameters(optimizer):
            other = holders.setdefault(id(parameter), optimizer)
            if other is not optimizer:
                _log.warning(
                    "%s and %s both hold %s, and both will update it. Pass each parameter to one "
                    "optimizer.",
                    type(other).__name__,
                    type(optimizer).__name__,
                    names.get(id(parameter), "a parameter"),
                )
                return


def _some_is_forgotten(params: list[Tensor]) -> bool:
    """Whether one of them is held by lists of optimizers only, not by a module or a variable."""
    if not params or gc.get_freeze_count():  # gc does not see references from frozen objects
        return False
    holders = [h for h in gc.get_referrers(*params) if not isinstance(h, _OF_OPTIMIZERS)]
    return not set(map(id, params)) <= set(map(id, gc.get_referents(*holders)))


_OF_OPTIMIZERS = (list, tuple, defaultdict)  # groups, and the state
