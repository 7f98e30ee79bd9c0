"""The table of optimizers and dtypes that the tests share, and small helpers."""

import itertools

import torch

from ampfuse import optim

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# optimizer name, options: each option alone and all of them together
OPTIMIZERS = {
    "sgd": ("SGD", {"lr": 1e-2}),
    "sgd-decay": ("SGD", {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd-momentum": ("SGD", {"lr": 1e-2, "momentum": 0.9}),
    "sgd-dampening": ("SGD", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3}),
    "sgd-nesterov": ("SGD", {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "sgd-maximize": ("SGD", {"lr": 1e-2, "momentum": 0.9, "maximize": True}),
    "sgd-all": (
        "SGD",
        {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "maximize": True},
    ),
    "adam": ("Adam", {"lr": 1e-2}),
    "adam-decay": ("Adam", {"lr": 1e-2, "weight_decay": 0.1}),
    "adam-amsgrad": ("Adam", {"lr": 1e-2, "amsgrad": True}),
    "adam-maximize": ("Adam", {"lr": 1e-2, "maximize": True}),
    "adam-all": (
        "Adam",
        {
            "lr": 1e-2,
            "betas": (0.8, 0.99),
            "eps": 1e-6,
            "weight_decay": 0.1,
            "amsgrad": True,
            "maximize": True,
        },
    ),
    "adamw": ("AdamW", {"lr": 1e-2}),
    "adamw-no-decay": ("AdamW", {"lr": 1e-2, "weight_decay": 0.0}),
    "adamw-amsgrad": ("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "adamw-maximize": ("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "maximize": True}),
    "adamw-all": (
        "AdamW",
        {
            "lr": 1e-2,
            "betas": (0.8, 0.99),
            "eps": 1e-6,
            "weight_decay": 0.1,
            "amsgrad": True,
            "maximize": True,
        },
    ),
}

# One of each kind, for tests whose subject is not the formula.
KINDS = ("sgd-all", "adam-all", "adamw")

# (dtype of gradients, dtype of model weights). Autograd gives gradients of the weight's dtype; for
# others see set_grad.
DTYPES = tuple(itertools.product((f32, f16, bf16), (f32, f16, bf16)))


def short(dtype):
    return {f16: "f16", bf16: "bf16", f32: "f32", f64: "f64"}[dtype]


def make(name, params, **more):
    """ampfuse's optimizer of the table's row `name`."""
    kind, options = OPTIMIZERS[name]
    return getattr(optim, kind)(params, **{**options, **more})


def make_torch(name, params, **more):
    kind, options = OPTIMIZERS[name]
    return getattr(torch.optim, kind)(params, **{**options, **more})


def set_grad(param, grad):
    """param.grad = grad, whatever the gradient's dtype."""
    if grad is not None and grad.dtype != param.dtype:
        param.grad = None
        param.grad_dtype = None
    param.grad = grad


def can_mix_dtypes():
    """Whether this torch lets a gradient have another dtype than its parameter."""
    return hasattr(torch.Tensor, "grad_dtype")


def bits(tensor):
    """The tensor's bits as integers, so that -0 differs from 0 and NaN equals itself."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64, 1: torch.uint8}
    return tensor.detach().cpu().contiguous().clone().view(integer[tensor.element_size()])


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def everything(optimizer):
    """Every tensor that a step of `optimizer` may write, by name."""
    found = {}
    i = 0
    for group in optimizer.param_groups:
        for param in group["params"]:
            found[f"param {i}"] = param
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"{key} {i}"] = value
            i += 1
    return found


def snapshot(optimizer):
    return {key: value.detach().clone() for key, value in everything(optimizer).items()}


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    different = [key for key in found if not same_bits(found[key], expected[key])]
    assert not different, f"bits differ in {different}"
