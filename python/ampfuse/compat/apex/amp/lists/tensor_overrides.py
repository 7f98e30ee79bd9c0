"""The methods and operators of ``torch.Tensor`` at O1."""

import torch

from ampfuse.compat.apex.amp.lists import torch_overrides
from ampfuse.compat.apex.amp.lists.names import names

MODULE = torch.Tensor


def _with_methods(kind: str, functions: list[str]) -> list[str]:
    return [name for name in names("torch.Tensor", kind) + functions if hasattr(MODULE, name)]


FP16_FUNCS = _with_methods("FP16_FUNCS", torch_overrides.FP16_FUNCS)
FP32_FUNCS = _with_methods("FP32_FUNCS", torch_overrides.FP32_FUNCS)
CASTS = _with_methods("CASTS", torch_overrides.CASTS)
SEQUENCE_CASTS: list[str] = []
