"""O1's lists as rules for ampfuse's casts."""

from __future__ import annotations

from typing import Any

from ampfuse.amp.autocast_rules import AUTOCAST, RNN_CELLS
from ampfuse.amp.op_rules import OpRules
from ampfuse.compat.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides


def op_rules(*, allow_banned: bool = False) -> OpRules:
    """The rules that the lists say now.

    The lists stopped growing with the PyTorch of 2019; newer operations are added to them.
    """
    banned = dict(functional_overrides.BANNED_FUNCS)
    low = _names("FP16_FUNCS") | RNN_CELLS
    promote = _names("CASTS") | _names("SEQUENCE_CASTS")
    listed = _names("FP32_FUNCS") - low - promote
    # A name that a script put into one of the lists stays where it put it.
    all_listed = low | promote | listed
    low |= AUTOCAST.low - all_listed
    promote |= AUTOCAST.promote - all_listed
    float32 = (listed | AUTOCAST.float32) - low - promote - banned.keys()
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
