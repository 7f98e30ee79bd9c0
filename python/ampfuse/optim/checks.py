"""One check for what users hand over: options, hyper-parameters, numbers of a checkpoint."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Rule(NamedTuple):
    """What a value has to be: `holds`, which may raise for one of a wrong type, and in words."""

    holds: Callable[[Any], bool]
    words: str


def one_of(*choices: Any) -> Rule:
    *most, last = map(repr, choices)
    return Rule(lambda value: value in choices, f"{', '.join(most)} or {last}")


def is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, numbers.Real)


FLAG = one_of(True, False)
NUMBER = Rule(is_number, "a number")
POSITIVE = Rule(lambda value: 0 < value < math.inf, "positive and finite")
ABOVE_0 = Rule(lambda value: value > 0, "positive")
COUNT = Rule(lambda value: 0 <= value < math.inf, "a finite number of at least 0")


def check(name: str, value: Any, rule: Rule) -> None:
    """Raise ValueError, by `name`, for a value that is not what `rule` says."""
    try:
        holds = rule.holds(value)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # such as "1" > 0
        holds = False
    if not holds:
        is_large = isinstance(value, Tensor) and value.numel() > 1
        what = f"a {value.dtype} tensor of shape {tuple(value.shape)}" if is_large else repr(value)
        raise ValueError(f"{name} is {what}; it has to be {rule.words}")
