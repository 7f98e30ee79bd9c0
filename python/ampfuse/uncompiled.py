"""What ``torch.compile`` leaves as it is: what goes around a backward pass, and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Decorator: compiled code calls `function` as it is, and so nothing in it is compiled either.

    For what works in the extension, where Dynamo sees nothing: it would compile the lines between
    the calls one by one, for each parameter anew. ``torch.compiler.disable`` does the same, but
    importing this would then import Dynamo, which takes a second.
    """
    call: Any = torch._disable_dynamo(function)
    # For the message of fullgraph=True.
    call._torchdynamo_disable = True
    call._torchdynamo_disable_msg = "ampfuse does this in its extension, outside of any graph"
    return call
