"""Keep ``torch.compile`` out of functions: those around a backward pass, and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def dynamo_disable(function: Function) -> Function:
    """Decorator: compiled code calls `function` uncompiled, with everything that it calls.

    For functions that work in the extension, which Dynamo cannot trace: it would compile the lines
    between the calls one by one, again for each parameter. ``torch.compiler.disable`` does the
    same, but imports Dynamo, which takes a second.
    """
    call: Any = torch._disable_dynamo(function)
    # For the message of fullgraph=True.
    call._torchdynamo_disable = True
    call._torchdynamo_disable_msg = "ampfuse does this in its extension, outside of any graph"
    return call
