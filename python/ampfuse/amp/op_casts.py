"""Apply :class:`~ampfuse.amp.op_rules.OpRules` to every operation inside a ``with`` block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ampfuse.amp.half_output import casts_are_disabled
from ampfuse.amp.op_rules import RNN_LAYERS, OpRules, name_of


class OpCasts(TorchFunctionMode):
    """Casts the arguments of torch's functions by `rules`, in this thread, inside the block.

    It sees the functions a program calls, not those that torch calls in them; put
    ``torch.autocast`` around it for these.
    """

    def __init__(self, rules: OpRules, dtype: torch.dtype) -> None:
        super().__init__()
        self.rules = rules
        self.dtype = dtype
        self.active = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward and _is_plain(*args, **kwargs):
            # torch leaves the block while it calls a function in here. A checkpointed part of a
            # model is computed again in the backward pass, and has to meet the same casts.
            with self:
                return _backward(*args, **kwargs)
        if self.active and not casts_are_disabled():
            name = name_of(func)
            args, kwargs = self.rules.apply(name, self.dtype, args, kwargs)
            if name in RNN_LAYERS:
                # Under autocast ampfuse runs these in FP32 on the CPU, where torch raises.
                with torch.autocast("cpu", enabled=False):
                    return func(*args, **kwargs)
        return func(*args, **kwargs)


def _is_plain(tensor: Tensor, *args: Any, **kwargs: Any) -> bool:
    """A backward pass of a loss into all leaves."""
    return tensor.requires_grad and tensor.numel() == 1 and kwargs.get("inputs") is None


def _backward(
    tensor: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: None = None,
) -> None:
    """``Tensor.backward`` by the tensor's place in the graph.

    Given the tensor itself, torch would look for function modes and find ours again.
    """
    if gradient is None:
        gradient = torch.ones_like(tensor)
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    torch.autograd.backward((edge,), (gradient,), retain_graph, create_graph)
