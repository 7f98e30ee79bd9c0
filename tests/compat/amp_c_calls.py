"""Calls of each operation of ``amp_C`` on lists of tensors."""

import torch

from ampfuse.compat.apex import amp_C
from cases import bf16, f16, f32

SIZES = (300, 5, 40000, 1)
LR, BETA1, BETA2, EPS, WD = 0.1, 0.9, 0.99, 1e-2, 0.1
T = 3  # the step


def rand(dtype=f32, device="cpu"):
    return [torch.rand(size).add(0.1).to(device, dtype) for size in SIZES]


def flag(value, device):
    return torch.full((1,), value, dtype=torch.int32, device=device)


def number(value, device, dtype=f32):
    return torch.tensor([value], dtype=dtype, device=device)


def call(name, noop, lists, options, chunk=65536):
    return getattr(amp_C, f"multi_tensor_{name}")(chunk, noop, lists, *options)


def arguments(name, device, lists=None):
    """The lists, float32, and the other arguments of a call."""
    one, step = number(1.0, device), number(T, device, torch.int32)
    moments = (BETA1, BETA2, EPS)
    norms = torch.ones(len(SIZES), device=device)
    depth, options = {
        "scale": (2, (1.0,)),
        "axpby": (3, (1.0, 1.0, -1)),
        "l2norm": (1, ()),
        "l2norm_mp": (1, ()),
        "unscale_l2norm": (1, (one,)),
        "l2norm_scale": (2, (1.0,)),
        "sgd": (3, (WD, 0.9, 0.0, LR, False, False, False, 1.0)),
        "adam": (4, (LR, *moments, T, 1, 1, WD)),
        "adam_capturable": (4, (one, *moments, step, 1, 1, WD, one / 2)),
        "adam_capturable_master": (5, (one, *moments, step, 1, 1, WD, one / 2)),
        "adagrad": (3, (LR, EPS, 1, WD)),
        "novograd": (3, (norms, LR, *moments, T, 1, WD, 1, 1, 2)),
        "lamb": (4, (LR, *moments, T, 1, WD, 1, 1, one, 1.0, False)),
        "lamb_mp": (5, (one, *moments, step, 1, WD, 1, 1, one, one, False, one * 0, one)),
        "lamb_stage1_cuda": (5, (norms, T, *moments, one, 1.0)),
        "lamb_stage2_cuda": (2, (norms, norms, LR, WD, False)),
    }[name]
    return lists or [rand(f32, device) for _ in range(depth)], options


def of_all_types(name, lists):
    """Lists that may hold half types have a float16 tensor second and a bfloat16 one fourth."""
    lists = lists[:4] if name == "lamb_mp" else lists
    halves = 2 if name.startswith("adam") else len(lists)
    dtypes = (f32, f16, f32, bf16)
    halved = [[t.to(d) for t, d in zip(ts, dtypes, strict=True)] for ts in lists[:halves]]
    return halved + lists[halves:]


OPERATIONS = [
    name.removeprefix("multi_tensor_") for name in amp_C.__all__ if name.startswith("multi_tensor_")
]
NAMES = [n for n in OPERATIONS if n.startswith(("ada", "la", "no", "sg"))]  # of optimizers
