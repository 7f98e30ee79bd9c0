"""What stands in for the layer and RMS norms of a model that is fused."""

from __future__ import annotations

from typing import Any, NamedTuple

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
# Copies of one class in the models of transformers; Gemma's have another weight, and call this eps.
_LLAMA = _Form(centered=False, eps="variance_epsilon", promotes=True)


def form_of(norm: nn.Module) -> _Form | None:
    """The fused form of `norm`; None if there is none."""
    cls = type(norm)
    if cls.__module__.startswith("transformers.") and hasattr(norm, _LLAMA.eps):
        return _LLAMA if cls.__name__.endswith(("RMSNorm", "T5LayerNorm")) else None
    written = cls.forward
    return _FORMS.get(f"{written.__module__}.{written.__qualname__}")


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
