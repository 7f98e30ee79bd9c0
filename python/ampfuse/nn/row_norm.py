"""What stands in for the layer and RMS norms of a model that is fused."""

from __future__ import annotations

import inspect
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ampfuse.nn.norm import normalize_rows
from ampfuse.nn.norm_act import are_bare, mark_fused


class _Form(NamedTuple):
    """What the ``forward`` of a class computes."""

    centered: bool = True
    eps: str = "eps"
    images: bool = False  # (N, C, H, W), over the channels
    promotes: bool = False  # to the weight's type, where this is another than the input's


# By where a ``forward`` was written.
_FORMS = {
    "torch.nn.modules.normalization.LayerNorm.forward": _Form(),
    "torch.nn.modules.normalization.RMSNorm.forward": _Form(centered=False),
    "timm.layers.norm.LayerNorm.forward": _Form(),
    "timm.layers.norm.LayerNorm2d.forward": _Form(images=True),
    "timm.layers.norm.RmsNorm.forward": _Form(centered=False),
    "torchvision.models.convnext.LayerNorm2d.forward": _Form(images=True),
}
# What transformers' models compute with classes of their own.
_LLAMA = _Form(centered=False, eps="variance_epsilon", promotes=True)
_LIKE_LLAMA: dict[type[nn.Module], bool] = {}
_ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}


def form_of(norm: nn.Module) -> _Form | None:
    """The fused form of `norm`; None if there is none."""
    cls = type(norm)
    if hasattr(norm, _LLAMA.eps):
        if cls not in _LIKE_LLAMA:
            _LIKE_LLAMA[cls] = _computes_rms_norm(norm)
        return _LLAMA if _LIKE_LLAMA[cls] else None
    written = cls.forward
    return _FORMS.get(f"{written.__module__}.{written.__qualname__}")


def _computes_rms_norm(norm: Any) -> bool:
    """Whether ``forward`` of its class is the RMS norm of one argument, by what it computes: the
    name tells neither of a weight that is added to 1 nor of a gate."""
    cls, eps = type(norm), getattr(norm, _LLAMA.eps)
    public = {name for name in vars(norm) if name[0] != "_"} - {_LLAMA.eps, "training", "forward"}
    parts = [*norm.named_parameters(), *norm.named_buffers(), *norm.named_children()]
    if public or [name for name, _ in parts] != ["weight"]:
        return False
    try:
        if len(inspect.signature(cls.forward).parameters) != 2:
            return False
        for training, (dtype, error) in itertools.product((True, False), _ERRORS.items()):
            generator = torch.Generator().manual_seed(0)
            weight, x = torch.randn(2, *norm.weight.shape, generator=generator, device="cpu")
            # Rows of a mean that is not 0, and of sizes at which eps matters and does not.
            x = (x + 1) * x.new_tensor([[0.1], [1.0], [1e3]]) * eps**0.5
            x, weight = x.to(dtype), nn.Parameter(weight.to(dtype), requires_grad=False)
            stand_in: Any = object.__new__(cls)
            stand_in.__dict__ = vars(norm) | {"_parameters": {"weight": weight}}
            stand_in.__dict__["training"] = training
            exact = x.double()
            exact = exact * (exact.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
            found = cls.forward(stand_in, x)
            if found.dtype != dtype or not torch.allclose(found.double(), exact, error, 0.0):
                return False
    except Exception:  # whatever its lines make of three rows
        return False
    return True


def add_norm(norm: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """``(norm(x + residual), x + residual)``, fused if `norm` is still what it seemed to be."""
    form = form_of(norm)
    alike = x.shape == residual.shape and x.dtype == residual.dtype
    if form is None or not alike or not _takes(form, norm, x) or not are_bare((norm,)):
        total = x + residual
        return norm(total), total
    y, total = _normalize(form, norm, x, residual)
    return y, total


@mark_fused
def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The ``forward`` that a norm by itself gets."""
    form = form_of(self)
    if form is None or len(args) != 1 or kwargs or not _takes(form, self, args[0]):
        return type(self).forward(self, *args, **kwargs)
    return _normalize(form, self, args[0])[0]


def _takes(form: _Form, norm: Any, x: Tensor) -> bool:
    if torch.compiler.is_compiling():  # a compiler fuses it with more than we do
        return False
    return not form.promotes or norm.weight.dtype == x.dtype


def _normalize(form: _Form, norm: Any, x: Tensor, residual: Tensor | None = None) -> list[Tensor]:
    """The norm, and with a residual the sum."""
    if form.images:
        x = x.permute(0, 2, 3, 1)
        residual = None if residual is None else residual.permute(0, 2, 3, 1)
    shape = getattr(norm, "normalized_shape", None) or norm.weight.shape
    bias, eps = norm.bias if form.centered else None, getattr(norm, form.eps)
    found = normalize_rows(x, residual, shape, norm.weight, bias, eps, centered=form.centered)
    return [y.permute(0, 3, 1, 2) for y in found] if form.images else found
