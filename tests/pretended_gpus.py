"""GPUs that torch only seems to have."""

from __future__ import annotations

import types

import torch

from ampfuse import _core

OF_TORCH = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]  # for CUDA 12.8 and 13

# By what torch and the extension say of a GPU (see `pretend`): why it is not used, what to do.
WITHOUT_KERNELS = {
    "ROCm": ({"hip": "7.2.0"}, ".* not for ROCm 7.2.0: train on the CPU, or under torch.amp alone"),
    "P100": (
        {"capability": (6, 0)},
        "torch .* has no kernels for this GPU .sm_60.: use .*choose T4 x2; or install torch "
        "2.11 to 2.14 for CUDA 12.6.*, and compile ampfuse with CUDA 12",
    ),
    "M40": ({"capability": (5, 2)}, "torch .*has no kernels .* .sm_52.: use .*, choose T4 x2"),
    "too new for torch": (
        {"capability": (12, 1), "of_torch": ["sm_60", "sm_90"]},
        "torch .* has no kernels for this GPU .sm_121.: install the newest torch",
    ),
    "too old for ampfuse": (
        {"capability": (6, 0), "of_torch": ["sm_60", "sm_90"]},
        "it is sm_60, .*sm_75.*compile ampfuse with an nvcc that supports this one",
    ),
    "an old driver": ({"driver": 12040}, ".* CUDA 12.4.*Update the driver .*580"),
    "built without": ({"archs": []}, ".* was built for CPUs; .*AMPFUSE_CUDA=ON"),
}


def pretend(
    monkeypatch,
    *,
    available=True,
    hip=None,
    cuda="13.0",
    error=None,
    other=None,
    capability=(9, 0),
    of_torch=OF_TORCH,
    archs=("sm_75", "sm_80", "sm_90", "compute_90"),
    driver=13000,
):
    """Have torch report this of itself, with one GPU if `available`."""

    def init():
        if error:
            raise RuntimeError(error)

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", None if hip or other else cuda)
    card = types.SimpleNamespace(name="A card", total_memory=2**34, major=capability[0])
    for name, value in (
        ("is_available", available),
        ("device_count", 1),
        ("get_device_properties", card),
        ("get_device_capability", capability),
        ("get_arch_list", of_torch),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "init", init)
    accelerator = torch.device(other) if other else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: accelerator)
    monkeypatch.setattr(_core.C, "cuda_archs", lambda: list(archs))
    monkeypatch.setattr(_core.C, "cuda_versions", lambda: (13000, driver))
