"""What ``amp.initialize`` says before it hurts: what this machine is slow at.

Each fact is told once in a process; ``verbosity=0`` is silent.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ampfuse import hardware
from ampfuse.amp.policy import Policy

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


def give_hints(policy: Policy, devices: Iterable[torch.device]) -> None:
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
            warn_if_bfloat16_is_emulated(device)
        # O2, O3 and O5 have next to no FP32 products.
        elif not (policy.model_is_low_precision or of.uses_tf32 or of.capability < (8, 0)):
            which = "what autocast leaves of them" if policy.autocast_type else "all of them"
            _say(
                f"FP32 matrix products run without TF32 on {of.name}; at {policy.opt_level} that "
                f"is {which}. torch.set_float32_matmul_precision('high') makes them several times "
                "as fast, with 10 instead of 23 bits behind the point."
            )


def warn_if_bfloat16_is_emulated(device: torch.device) -> None:
    """Warn, once per GPU, if `device` has no BF16 arithmetic (before sm_80: T4, V100, P100)."""
    if device.type == "cuda":
        _check_bfloat16(device)


@functools.cache
def _check_bfloat16(device: torch.device) -> None:
    of = machine(device)
    if not of.has_bf16:
        warnings.warn(
            f"{of.name} (sm_{of.capability[0]}{of.capability[1]}) has no BF16 arithmetic: torch "
            "emulates it, slowly. On this GPU use O1 or O2 (FP16) for speed.",
            stacklevel=5,
        )


@functools.cache
def _say(message: str) -> None:
    _log.warning("%s", message)
