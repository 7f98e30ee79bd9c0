"""Gradients between backward and step: scaled, unscaled, left for later.

The gradients themselves are in the extension's ``GradientLedger``; csrc/torch/gradient_ledger.h
says where they are at which time.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor

from ampfuse import _core
from ampfuse.dtypes import HALF_DTYPES
from ampfuse.optim.inner import parameters
from ampfuse.optim.masters import MasterParameter, leaf_of
from ampfuse.optim.parts import Part
from ampfuse.optim.shards import local, placed_as
from ampfuse.uncompiled import uncompiled


class Ledger(Part):
    """Takes in backward passes whose gradients carry a loss scale, for an optimizer.

    Attributes:
        in_backward: a block of ``scale_loss`` is open: between `begin` and `end` or `cancel`.
    """

    in_backward = False

    @property
    def _rows(self) -> Any:
        return self.optimizer._rows

    @uncompiled
    def begin(self) -> None:
        """Put earlier gradients away, so that a backward pass brings new ones only."""
        self._rows.current().gradients.begin_backward()
        self.in_backward = True

    @uncompiled
    def end(self, scale: Tensor, check: bool, delay: bool = False) -> bool:
        """Take in a pass whose gradients carry `scale` (float32, 0-dim): inspect and unscale.

        Arguments:
            delay: leave the verdict of the inspection to the next pass.

        Returns:
            Whether it left a gradient, or the delayed one before it did.
        """
        gradients = self._rows.known().gradients
        left = gradients.end_backward(scale, check, delay)
        self.in_backward = False
        if self.optimizer._under_amp and self._rows.has_shards:
            # A DTensor cannot do that when somebody looks at its gradient.
            gradients.materialize()
        return left

    @uncompiled
    def check(self) -> None:
        """Raise RuntimeError or TypeError for a gradient that no step takes."""
        self._rows.known().gradients.check()

    @property
    def is_delayed(self) -> bool:
        """The last pass left its verdict to the next one."""
        table = self._rows.table
        return table is not None and table.gradients.is_delayed

    def cancel(self) -> None:
        """The pass failed: drop what it left and keep what was there before."""
        self.in_backward = False
        if self._rows.table is not None:  # else the pass failed because there could be none
            self._rows.table.gradients.cancel_backward()

    def rows_of(self, params: Container[int]) -> list[int]:
        """Those of parameters of a model, given by their ids."""
        self._rows.current()
        return [row for row, param in enumerate(self._rows.params) if id(leaf_of(param)) in params]

    # Neither is called where Dynamo traces.

    def look(self, param: Tensor) -> None:
        """Somebody reads ``param.grad``: of a master or of its weight it is FP32 and unscaled."""
        if self._rows.table is not None:
            self._rows.table.gradients.look(param)

    def assign(self, param: Tensor, value: Tensor | None) -> None:
        """Somebody sets it: what is set is the gradient of the step, under both names."""
        if self._rows.table is not None or value is not None:
            (self._rows.table or self._rows.current()).gradients.assign(param, value)

    def unscale(self, scale: Tensor) -> Tensor:
        """Divide all gradients by `scale` (float32, 0-dim) now, exactly.

        FP32 gradients are divided in place. Half gradients of a parameter outside amp become FP32
        ones, because rounding them back to half would flush small values to zero.

        Returns:
            The flag, float32 and 0-dim: 1 if a gradient was not finite.
        """
        rows = self._rows
        table = rows.current()
        found_inf = table.inspector.state_field("found_inf")
        if self.optimizer._under_amp and table.masters.exist():  # half gradients wait for these
            table.gradients.end_backward(scale, True)
        else:
            table.plan.collect(None, False)  # refuses by name what no step takes
            _unscale(rows.params, scale.double().reciprocal().float(), found_inf)
            if rows.ranks is not None:
                rows.ranks.share(found_inf)
        return found_inf

    def check_before_step(self) -> None:
        """Raise RuntimeError inside a scale_loss context, and where torch's GradScaler steps."""
        if self.in_backward:
            raise RuntimeError(
                "step() was called inside the scale_loss context, where gradients are still "
                "scaled. Call optimizer.step() after the with block."
            )
        optimizer = self.optimizer
        is_torchs = "found_inf" in vars(optimizer) and not optimizer._scaler_is_ours
        if is_torchs and any(isinstance(param, MasterParameter) for param in parameters(optimizer)):
            raise RuntimeError(
                "torch.amp.GradScaler does not see the half-precision gradients of an optimizer "
                "that went through amp.initialize. Write `with amp.scale_loss(loss, optimizer) as "
                "scaled_loss: scaled_loss.backward()` and optimizer.step(), without a scaler."
            )


@torch.no_grad()
def _unscale(params: Iterable[Tensor], inv_scale: Tensor, found_inf: Tensor) -> None:
    """What :meth:`Ledger.unscale` does outside amp; `found_inf` becomes 1 if one is not finite."""
    held = [(param, local(param.grad)) for param in params if param.grad is not None]
    old, new = [], []
    for _, gradient in held:
        is_dense = torch.ops.aten.is_non_overlapping_and_dense(gradient)
        old.append(gradient if is_dense else gradient.clone())  # which has no gaps in memory
        is_half = gradient.dtype in HALF_DTYPES
        new.append(torch.empty_like(old[-1], dtype=torch.float32) if is_half else old[-1])
    if old:
        _core.C.unscale(old, new, inv_scale, found_inf)
    for (param, gradient), unscaled in zip(held, new, strict=True):
        if unscaled is gradient:
            continue
        if param.dtype in HALF_DTYPES:
            param.grad_dtype = None  # any type; the next backward gives a half gradient again
        param.grad = placed_as(param, unscaled)
