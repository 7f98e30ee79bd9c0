"""What hyper-parameters have to be, in groups and as arguments of constructors."""

from __future__ import annotations

import math
from typing import Any

from ampfuse.optim.checks import NUMBER, Rule, check, is_number, one_of

_NUMBERS = ("lr", "weight_decay", "momentum", "dampening", "eps", "lr_decay")
_FLAGS = (
    "amsgrad",
    "bias_correction",
    "decoupled_weight_decay",
    "grad_averaging",
    "init_zero",
    "maximize",
    "nesterov",
    "reg_inside_moment",
    "use_nvlamb",
    "wd_after_momentum",
)
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_NUMBERS, NUMBER),
    **dict.fromkeys(_FLAGS, one_of(True, False, None)),  # None is False to torch
    "betas": Rule(lambda pair: len(pair) == 2 and all(map(is_number, pair)), "two numbers"),
    "norm_type": one_of(2, math.inf, 0),  # 0 is apex's name of inf
}


class Asked(dict[str, Any]):
    """A group that knows what it was asked for: the rest may be anything."""

    def __init__(self, group: dict[str, Any]) -> None:
        super().__init__(group)
        self._names: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self._names.append(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._names += [name] * (name in self)
        return super().get(name, default)

    def check(self) -> None:
        """Raise ValueError if something was that is of no type to go on with."""
        for name in self._names:
            check(name, super().__getitem__(name), _RULES[name])


def check_range(hyper: dict[str, Any]) -> None:
    """Raise ValueError, in torch's words, for what no optimizer takes. `hyper`: of ``_hyper``."""
    if not hyper["lr"] >= 0.0:
        raise ValueError(f"Invalid learning rate: {hyper['lr']}")
    for i in (0, 1):
        if not 0.0 <= (beta := hyper.get(f"beta{i + 1}", 0.0)) < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
    if not hyper.get("eps", 0.0) >= 0.0:
        raise ValueError(f"Invalid epsilon value: {hyper['eps']}")
    if not hyper["weight_decay"] >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {hyper['weight_decay']}")
