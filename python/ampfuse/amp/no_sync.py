"""Accumulation under ``DistributedDataParallel.no_sync()``.

DDP averages ``.grad`` at the end of a pass that it synchronises. ``scale_loss`` has put gradients
of earlier passes away by then, so they are averaged here, in FP32, when that pass begins. Ranks
also share the overflow flags of these passes; otherwise their loss scales would differ.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ampfuse.amp.function_casts import Replacements

# The models whose no_sync() was called, with the ids of their parameters.
_models: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()

_DDP: Any = torch.nn.parallel.DistributedDataParallel
_replaced = Replacements()


def watch() -> None:
    """Record from now on the models whose ``no_sync()`` is called; nothing else changes."""
    if (_DDP, "no_sync") in _replaced or not torch.distributed.is_available():
        return
    no_sync = _DDP.no_sync

    @functools.wraps(no_sync)
    def watched(self: Any) -> Any:
        _models[self] = frozenset(map(id, self.module.parameters()))
        return no_sync(self)

    _replaced.replace(_DDP, "no_sync", watched)


unwatch = _replaced.put_back


@torch.no_grad()
def average_earlier(optimizers: Sequence[Any]) -> list[Any]:
    """Average earlier gradients at the start of a pass of `optimizers` that is synchronised.

    Returns:
        The process groups that must share the overflow flags of the pass.
    """
    groups = []
    for model, params in _models.items():
        rows = [optimizer.rows_of(params) for optimizer in optimizers]
        if not any(rows):
            continue
        averaged = False
        # The flag of the last forward is that of an evaluation, if there was one since.
        if model.require_backward_grad_sync or model.require_forward_param_sync:
            for optimizer, mine in zip(optimizers, rows, strict=True):
                earlier = list(_earlier_gradients(optimizer, mine, model))
                _average(earlier, model.process_group)
                averaged |= bool(earlier)
        if averaged or not model.require_forward_param_sync:
            groups.append(model.process_group)
    return groups


def share(flags: Sequence[Tensor], groups: Sequence[Any]) -> None:
    """Set each of `flags` (float32, 0-dim) to the maximum over all ranks."""
    for group in groups:
        for flag in flags:
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group)


def _earlier_gradients(optimizer: Any, rows: list[int], model: Any) -> Iterator[Tensor]:
    table = optimizer.param_table()
    have = [table.gradients.accumulated(row) is not None for row in rows]
    if model.find_unused_parameters and rows:  # other ranks may have other gradients
        flags = torch.tensor(have, dtype=torch.float32, device=table.param(rows[0]).device)
        share([flags], [model.process_group])
        have = flags.tolist()
    for row, has in zip(rows, have, strict=True):
        if not has:
            continue
        if model.find_unused_parameters:  # DDP needs a gradient where earlier passes left one
            half = table.model(row)
            leaf = table.param(row) if half is None else half
            table.gradients.assign(leaf, torch.zeros_like(leaf))
        yield table.gradients.accumulated(row, make=True)


def _average(tensors: list[Tensor], group: Any) -> None:
    works = [
        torch.distributed.all_reduce(tensor.div_(group.size()), group=group, async_op=True)
        for tensor in tensors
    ]
    for work in works:
        work.wait()
