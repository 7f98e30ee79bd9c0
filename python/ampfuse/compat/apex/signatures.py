"""Arguments as apex has them, in a line: names, order and defaults."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable
from typing import Any

Taker = Callable[[Any, dict[str, Any]], Any]


def takes(text: str, first: str = "self") -> Callable[[Taker], Callable[..., Any]]:
    """Decorator: ``f(first, given)`` gets the arguments of `text`, by position or name, as a dict.

    As in ``"params lr=1e-3 betas=(0.9,0.999) * capturable=False"``, with spaces only in between.
    """
    of: Any = inspect.Parameter
    kind = of.POSITIONAL_OR_KEYWORD
    parameters = []
    for item in [first, *text.split()]:
        name, _, default = item.partition("=")
        if name == "*":
            kind = of.KEYWORD_ONLY
            continue
        value = ast.literal_eval(default) if default else of.empty
        parameters.append(of(name, kind, default=value))
    signature = inspect.Signature(parameters)

    def decorate(function: Taker) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
            return function(given.pop(parameters[0].name), given)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate
