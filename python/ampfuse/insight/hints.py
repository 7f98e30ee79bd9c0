"""What ``amp.initialize`` says before it hurts: what does not fit, what this machine is slow at.

The latter is told once in a process, and not with ``verbosity=0``.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ampfuse import hardware
from ampfuse.amp.casts import eager_module
from ampfuse.amp.policy import Policy
from ampfuse.insight.half_range import warn_of_range
from ampfuse.optim.inner import parameters, with_inner
from ampfuse.optim.upgrade import fused_class

_log = logging.getLogger("ampfuse.amp")

_FP16_ON_CPUS = frozenset({"avx512_fp16", "amx_fp16", "asimdhp"})


class Machine(NamedTuple):
    """What advice depends on.

    Attributes:
        name: of the GPU or CPU.
        capability: compute capability of an NVIDIA GPU; (0, 0) of anything else.
        has_fp16, has_bf16: whether it computes in these types.
        uses_tf32: whether FP32 matrix products run in TF32.
    """

    name: str
    capability: tuple[int, int] = (0, 0)
    has_fp16: bool = True
    has_bf16: bool = True
    uses_tf32: bool = True


def machine(device: torch.device) -> Machine:
    """What is known of `device`."""
    if device.type == "cpu":
        flags = hardware.cpu_flags()  # empty where they are not known: then nothing is said
        has_fp16 = not flags or not flags.isdisjoint(_FP16_ON_CPUS)
        return Machine(hardware.cpu_model(), (0, 0), has_fp16, not flags or hardware.cpu_has_bf16())
    if device.type != "cuda" or torch.version.hip is not None:
        return Machine(device.type)
    gpu = torch.cuda.get_device_properties(device)
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return Machine(gpu.name, (gpu.major, gpu.minor), has_bf16=gpu.major >= 8, uses_tf32=tf32)


def give_hints(
    models: list[nn.Module], optimizers: list[Optimizer], policy: Policy, verbosity: int
) -> None:
    """What :func:`ampfuse.amp.initialize` calls before it changes anything."""
    if optimizers:
        _warn_of_strangers(models, optimizers)
    _warn_of_lost_eps(optimizers, policy)
    for model in models:
        warn_of_range(model, policy)
    if verbosity >= 1:
        devices = {p.device for model in models for p in eager_module(model).parameters()}
        say_what_is_slow(policy, devices)


def say_what_is_slow(policy: Policy, devices: Iterable[torch.device]) -> None:
    """Say, once, what is slow at this level on `devices`."""
    uses_fp16 = torch.float16 in (policy.cast_model_type, policy.autocast_type)
    for device in devices:
        of = machine(device)
        lacks = "FP16" if uses_fp16 and not of.has_fp16 else None
        if policy.uses_bfloat16 and not of.has_bf16:
            lacks = "BF16"
        if device.type == "cpu" and lacks:
            use = "O4 or O5 (BF16, which it has)" if uses_fp16 and of.has_bf16 else "O0"
            _say(
                f"{of.name} has no {lacks} arithmetic: {policy.opt_level} computes in FP32 and "
                f"rounds. That saves memory and costs time; for speed use {use} on this CPU."
            )
        elif lacks:
            _warn_of_emulation(of)
        # O2, O3 and O5 have next to no FP32 products.
        elif not (policy.model_is_low_precision or of.uses_tf32 or of.capability < (8, 0)):
            which = "what autocast leaves of them" if policy.autocast_type else "all of them"
            _say(
                f"FP32 matrix products run without TF32 on {of.name}; at {policy.opt_level} that "
                f"is {which}. torch.set_float32_matmul_precision('high') makes them several times "
                "as fast, with 10 instead of 23 bits behind the point."
            )


@functools.cache
def _warn_of_emulation(gpu: Machine) -> None:
    """Before sm_80: T4, V100, P100."""
    warnings.warn(
        f"{gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]}) has no BF16 arithmetic: torch "
        "emulates it, slowly. On this GPU use O1 or O2 (FP16) for speed.",
        stacklevel=6,
    )


@functools.cache
def _say(message: str) -> None:
    _log.warning("%s", message)


def _warn_of_strangers(models: list[nn.Module], optimizers: list[Optimizer]) -> None:
    """Warn of an optimizer that was most likely made for another copy of a model.

    It holds none of the models' parameters, and either no optimizer does, or it holds parameters of
    the same shapes. Others may be of a loss with parameters of its own.
    """
    own = [list(eager_module(model).parameters()) for model in models]
    known = {id(parameter) for listed in own for parameter in listed}
    held = [[p for one in with_inner(each) for p in parameters(one)] for each in optimizers]
    strangers = [known.isdisjoint(map(id, params)) for params in held]
    if not any(parameter.requires_grad for listed in own for parameter in listed):
        return
    shapes = [Counter(parameter.shape for parameter in listed) for listed in own]
    for optimizer, params, is_stranger in zip(optimizers, held, strangers, strict=True):
        alike = Counter(parameter.shape for parameter in parameters(optimizer)) in shapes
        if params and is_stranger and (all(strangers) or alike):
            warnings.warn(
                f"{type(optimizer).__name__} holds no parameter of the model(s) given to "
                "amp.initialize, so it does not train them. Was it made from another copy, before "
                "a copy.deepcopy, a wrapper such as fully_shard, or a change that replaced the "
                "parameters? Make it from model.parameters() just before amp.initialize.",
                stacklevel=5,
            )


def _warn_of_lost_eps(optimizers: list[Optimizer], policy: Policy) -> None:
    """Warn of an optimizer that divides by zero where its `eps` keeps it from that."""
    if policy.weights_type is not torch.float16 or policy.master_weights:
        return
    for optimizer in optimizers:
        stepper = with_inner(optimizer)[-1]
        for eps in {group.get("eps") for group in stepper.param_groups}:
            # Adafactor has two, in a tuple.
            lost = isinstance(eps, float) and eps > 0 and torch.tensor(eps).half() == 0
            if lost and fused_class(stepper) is None:
                warnings.warn(
                    f"eps={eps:g} of {type(stepper).__name__} is 0 in float16, in which its own "
                    f"step computes at {policy.opt_level}: where a gradient was always 0 it "
                    "divides by 0. Use O2 or O5, whose masters are FP32, or an eps of 1e-4.",
                    stacklevel=5,
                )
