"""What is in an optimizer: parameters, and in Lookahead and the like another optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def check_optimizer(value: Any, call: str) -> None:
    """Raise TypeError, which says how to write `call`, unless `value` is or wraps an optimizer."""
    if not hasattr(value, "param_groups"):
        raise TypeError(
            f"{call.partition('(')[0]} takes the optimizer, not {type(value).__name__}: "
            f"write {call}."
        )


def parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """What `optimizer` steps, in the order of its groups."""
    for _, param in with_groups(optimizer):
        yield param


def is_empty(optimizer: Any) -> bool:
    """Whether there is nothing to step, in groups that may be filled later."""
    groups = optimizer.param_groups
    return bool(groups) and not any(group["params"] for group in groups)


def with_groups(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """... each behind its group."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield group, param


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """`optimizer`, and the optimizers among its attributes, at any depth, each once."""
    found = [optimizer]
    for outer in found:
        for value in vars(outer).values():
            found.extend(one for one in _optimizers_in(value) if all(one is not f for f in found))
    return found


def _optimizers_in(value: Any) -> list[Optimizer]:
    if isinstance(value, dict):
        value = list(value.values())
    items = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in items if isinstance(item, Optimizer)]
