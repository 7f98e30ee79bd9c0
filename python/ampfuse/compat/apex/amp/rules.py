"""O1's lists as rules for ampfuse's casts."""

from __future__ import annotations

from typing import Any

from ampfuse.amp.half_output import FP32_FUNCTIONS
from ampfuse.amp.op_rules import OpRules
from ampfuse.compat.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

_RNN_CELLS = ("gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell")


def op_rules(*, allow_banned: bool = False) -> OpRules:
    """The rules that the lists say now.

    The lists stopped growing with the PyTorch of 2019. Autocast knows newer operations (attention,
    einsum, ``torch.linalg``), ``FP32_FUNCTIONS`` newer losses and reductions.
    """
    banned = dict(functional_overrides.BANNED_FUNCS)
    low = _names("FP16_FUNCS") | set(_RNN_CELLS)
    promote = _names("CASTS") | _names("SEQUENCE_CASTS")
    listed = _names("FP32_FUNCS") - low - promote
    float32 = (listed | FP32_FUNCTIONS) - low - promote - banned.keys()
    if allow_banned:
        float32 |= banned.keys()
        banned = {}
    return OpRules(
        low=frozenset(low),
        float32=frozenset(float32),
        # To torch `x **= 2` is the same call as `x.pow_(2)`, and apex let the first pass.
        not_in_place=frozenset(listed - {"pow"}),
        promote=frozenset(promote - low),
        banned=tuple(banned.items()),
    )


def _names(kind: str) -> set[str]:
    modules: tuple[Any, ...] = (functional_overrides, torch_overrides, tensor_overrides)
    return {name for module in modules for name in getattr(module, kind, ())}
