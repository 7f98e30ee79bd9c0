"""Gradients between backward and step: scaled, unscaled, left for later.

The gradients themselves are in the extension's ``ParamTable``; csrc/torch/gradient_phase.h says
where they are at which time.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch import Tensor

from ampfuse.optim import left_scaled
from ampfuse.optim.inner import parameters
from ampfuse.optim.masters import MasterParameter
from ampfuse.optim.rows import Rows
from ampfuse.optim.unscaling import unscale
from ampfuse.uncompiled import uncompiled


class Gradients(Rows):
    """Mixin: takes in backward passes whose gradients carry a loss scale.

    Attributes:
        in_backward: between `begin_backward` and the call that ends the pass.
        has_scaled_gradients: the last pass that ended left its gradients scaled (`mark_backward`).
    """

    in_backward: bool = False
    has_scaled_gradients: bool = False

    # Gradients of a pass that did not list this optimizer, by row.
    _left_scaled: dict[int, left_scaled.Mark] = {}  # noqa: RUF012, replaced and never changed

    @uncompiled
    def begin_backward(self) -> None:
        """Put earlier gradients away, so that a backward pass brings new ones only."""
        if self._left_scaled:
            left_scaled.warn_if_used(self)
        self.param_table().begin_backward()
        self.in_backward = True

    @uncompiled
    def end_backward(self, scale: Tensor, check: bool) -> bool:
        """Take in a pass whose gradients carry `scale` (float32, 0-dim): inspect and unscale.

        Returns:
            Whether the pass says something about the loss scale: not where there are shards, and
            FSDP keeps the gradients until a pass that it synchronises. They carry the scale,
            which must not change between.
        """
        self.in_backward = self.has_scaled_gradients = False
        table = self._known_table()
        left = table.end_backward(scale, check)
        if self._under_amp and self._has_shards:
            table.materialize()  # a DTensor cannot do that when somebody looks at its gradient
        return left or not self._has_shards

    @uncompiled
    def mark_backward(self, scale: Tensor) -> None:
        """Take in a pass, but leave its gradients scaled until the next pass or the step."""
        self.in_backward, self.has_scaled_gradients = False, True
        self._known_table().mark_backward(scale)

    def cancel_backward(self) -> None:
        """The pass failed: drop what it left and keep what was there before."""
        self.in_backward = False
        if self._table is not None:  # else the pass failed because there could be none
            self._table.cancel_backward()

    def rows_of(self, params: Container[int]) -> list[int]:
        """Those of parameters of a model, given by their ids."""
        self.param_table()
        leaves = [getattr(param, "model_param", param) for param in self._row_params]
        return [row for row, leaf in enumerate(leaves) if id(leaf) in params]

    def earlier_sparse(self, rows: Iterable[int]) -> list[str]:
        """During a pass: names of those of `rows` to which earlier ones gave sparse gradients."""
        return []

    @uncompiled
    def materialize_gradients(self) -> None:
        if self._table is not None and not self.in_backward:
            self._table.materialize()

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take over every edit of the model's half weights, those made through ``.data`` too.

        Edits that autograd can see (``load_state_dict``, ``clamp_`` under ``no_grad``, assigning
        ``.data``) are followed by themselves at the next step; an in-place change of ``p.data``
        leaves no trace, and needs this call before the step. Other elements keep their bits.
        """
        self.param_table().refresh_masters(all=True)

    @property
    def found_inf_flag(self) -> Tensor:
        """float32, 0-dim, on the device: 1 if a gradient since the last step was not finite."""
        return self.param_table().state_field("found_inf")

    @property
    def pass_found_inf_flag(self) -> Tensor:
        """float32, 0-dim, on the device: 1 if a gradient of the last backward pass was not finite.

        Passes with ``delay_unscale`` before it belong to it: nobody looked at their gradients then.
        """
        return self.param_table().state_field("pass_found_inf")

    @uncompiled
    @torch.no_grad()
    def inspect_gradients(self) -> Tensor:
        """Look at the gradients now, as the step would, which need not look again.

        Returns:
            `found_inf_flag`. In a backward pass, what was known before it.
        """
        table = self.param_table()
        if not self.in_backward:
            table.collect(None, False)
            table.measure()
        return self.found_inf_flag

    def unscale_gradients(self, scale: Tensor) -> Tensor:
        """Divide all gradients by `scale` (float32, 0-dim) now, exactly.

        FP32 gradients are divided in place. Half gradients of a parameter outside amp become FP32
        ones, because rounding them back to half would flush small values to zero.

        Returns:
            The flag, float32 and 0-dim: 1 if a gradient was not finite.
        """
        table, found_inf = self.param_table(), self.found_inf_flag
        if self._has_amp_masters():
            table.end_backward(scale, True)
        else:
            inv_scale = scale.to(torch.float64).reciprocal().to(torch.float32)
            unscale(self._row_params, inv_scale, found_inf)
            if self._ranks is not None:
                self._ranks.share(found_inf)
        return found_inf

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, and also drops what amp holds of earlier passes."""
        if self._table is not None:
            self.param_table().zero_grad(set_to_none)
            return
        for param in parameters(self):
            if isinstance(param, MasterParameter) and param.model_param.grad is not None:
                if set_to_none:
                    param.model_param.grad = None
                else:
                    param.model_param.grad.detach_().zero_()
        super().zero_grad(set_to_none)
